// The filters and the time range of the page Requests.

import { useEffect, useState } from "preact/hooks";
import { count } from "../format";
import { CHOICES, LAST_DEFAULT, numFilters, type Choice, type Query } from "./request_query";

/** How many requests have each value, by filter. */
export type Facets = Partial<Record<Choice, Record<string, number>>>;

const NAMES: Record<Choice, string> = {
  tenant: "tenant",
  path: "path",
  reason: "reason",
  outcome: "outcome",
  engine: "engine",
  course: "what happened",
};
const LASTS: [string, string][] = [
  ["300", "last 5 minutes"],
  [LAST_DEFAULT, "last 15 minutes"],
  ["3600", "last hour"],
  ["21600", "last 6 hours"],
  ["all", "all that are kept"],
];
const WIDE = matchMedia("(min-width: 761px)");

interface Props {
  query: Query;
  facets: Facets;
  onChange: (query: Query) => void;
}

export function Filters({ query, facets, onChange }: Props) {
  const set = (changed: Query) => onChange({ ...query, ...changed });
  const isSpan = query.since != null || query.until != null;
  const span = (last: string) => {
    const { since: _, until: __, ...rest } = query;
    if (last !== "span") return onChange({ ...rest, last });
    const now = Math.floor(Date.now() / 1000);
    onChange({ ...query, since: `${now - 900}`, until: `${now}` });
  };
  const num = numFilters(query);
  return (
    <form class="filters tool" onSubmit={(event) => event.preventDefault()}>
      <label>
        time
        <select value={isSpan ? "span" : (query.last ?? LAST_DEFAULT)} onChange={(e) => span(e.currentTarget.value)}>
          {LASTS.map(([value, text]) => (
            <option value={value}>{text}</option>
          ))}
          <option value="span">from … to …</option>
        </select>
      </label>
      {isSpan && (
        <>
          <Instant label="from" value={query.since} onChange={(since) => set({ since })} />
          <Instant label="to" value={query.until} onChange={(until) => set({ until })} />
        </>
      )}
      <details open={WIDE.matches || undefined}>
        <summary>Filters{num > 0 && ` (${num})`}</summary>
        <div class="choices">
          {CHOICES.map((name) => (
            <label>
              {NAMES[name]}
              <select value={query[name] ?? ""} onChange={(e) => set({ [name]: e.currentTarget.value })}>
                <option value="">all</option>
                {options(query[name], facets[name]).map(([value, found]) => (
                  <option value={value}>
                    {value} ({count(found)})
                  </option>
                ))}
              </select>
            </label>
          ))}
          <Typed label="TTFT at least, ms" type="number" value={query.ttft_min} onChange={(ttft_min) => set({ ttft_min })} />
          <Typed label="whole at least, ms" type="number" value={query.e2e_min} onChange={(e2e_min) => set({ e2e_min })} />
          <Typed label="id begins with" type="search" value={query.id} onChange={(id) => set({ id })} />
          {num > 0 && (
            <button type="button" onClick={() => onChange(timeOf(query))}>
              Clear
            </button>
          )}
        </div>
      </details>
    </form>
  );
}

function timeOf({ last, since, until }: Query): Query {
  return Object.fromEntries(Object.entries({ last, since, until }).filter(([, value]) => value != null));
}

/** Values that are known, and the one that is chosen, whether or not a request has it. */
function options(chosen: string | undefined, facet: Record<string, number> = {}): [string, number][] {
  const known = Object.entries(facet);
  return chosen && !(chosen in facet) ? [[chosen, 0], ...known] : known;
}

interface TypedProps {
  label: string;
  type: "number" | "search";
  value: string | undefined;
  onChange: (value: string) => void;
}

/** A text that is asked for once typing rests. */
function Typed({ label, type, value, onChange }: TypedProps) {
  const [text, setText] = useState(value ?? "");
  useEffect(() => setText(value ?? ""), [value]);
  useEffect(() => {
    if (text === (value ?? "")) return;
    const timer = setTimeout(() => onChange(text.trim()), 300);
    return () => clearTimeout(timer);
  }, [text]);
  return (
    <label>
      {label}
      <input
        type={type}
        min={type === "number" ? 0 : undefined}
        step="any"
        maxLength={128}
        value={text}
        onInput={(event) => setText(event.currentTarget.value)}
      />
    </label>
  );
}

interface InstantProps {
  label: string;
  value: string | undefined;
  onChange: (unixS: string) => void;
}

/** An instant in the time of the browser. */
function Instant({ label, value, onChange }: InstantProps) {
  const at = Number(value);
  const local = value ? new Date(at * 1000 - new Date(at * 1000).getTimezoneOffset() * 60_000) : null;
  return (
    <label>
      {label}
      <input
        type="datetime-local"
        step="1"
        value={local && Number.isFinite(at) ? local.toISOString().slice(0, 19) : ""}
        onChange={(event) => {
          const unixS = new Date(event.currentTarget.value).getTime() / 1000;
          if (Number.isFinite(unixS)) onChange(`${unixS}`);
        }}
      />
    </label>
  );
}
