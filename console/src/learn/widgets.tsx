// Small controls that several parts share.

interface ChoiceProps {
  label: string;
  options: [string, string][];
  value: string;
  onChange: (value: string) => void;
}

/** A choice of one of a few. */
export function Choice({ label, options, value, onChange }: ChoiceProps) {
  return (
    <fieldset class="choice">
      <legend>{label}</legend>
      {options.map(([key, words]) => (
        <label class={key === value ? "on" : ""}>
          <input type="radio" name={label} checked={key === value} onChange={() => onChange(key)} />
          {words}
        </label>
      ))}
    </fieldset>
  );
}

interface GaugeProps {
  name: string;
  /** Share of what there is; above 1 is too much. */
  load: number;
  words: string;
  tone: "local" | "remote" | "writing";
}

export function Gauge({ name, load, words, tone }: GaugeProps) {
  return (
    <div class={`gauge ${tone} ${load > 1 ? "over" : ""}`}>
      <span>{name}</span>
      <span class="bar" aria-hidden="true">
        <i style={{ width: `${Math.min(load / 1.5, 1) * 100}%` }} />
        <u />
      </span>
      <b>{words}</b>
    </div>
  );
}
