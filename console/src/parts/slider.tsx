// A labelled slider, linear or logarithmic.

import { useId } from "preact/hooks";

interface Props {
  label: string;
  value: number;
  low: number;
  high: number;
  step?: number;
  /** Equal distances are equal ratios. */
  log?: boolean;
  format: (value: number) => string;
  onChange: (value: number) => void;
}

const NOTCHES = 400;

export function Slider({ label, value, low, high, step, log, format, onChange }: Props) {
  const place = log ? (Math.log(value / low) / Math.log(high / low)) * NOTCHES : value;
  const moved = (text: string) =>
    onChange(log ? low * (high / low) ** (Number(text) / NOTCHES) : Number(text));
  const id = useId();
  return (
    <div class="slider">
      <label for={id}>{label}</label>
      <output for={id}>{format(value)}</output>
      <input
        id={id}
        type="range"
        min={log ? 0 : low}
        max={log ? NOTCHES : high}
        step={log ? 1 : (step ?? "any")}
        value={place}
        aria-valuetext={format(value)}
        onInput={(event) => moved(event.currentTarget.value)}
      />
    </div>
  );
}
