// Figures of the filtered requests over time, under one cursor.

import { useEffect, useMemo, useState } from "preact/hooks";
import { get } from "../api";
import { Chart, COLOURS, type Line } from "../chart";
import { count, duration, DURATION_STEPS, percent, short, whole } from "../format";
import { asked, stretch, type Query } from "./request_query";

const LOOK_MS = 5000;
/** On phones the list comes first. */
const WIDE = matchMedia("(min-width: 761px)");
const HOUR_S = 3600;

type Column = (number | null)[];

interface Series {
  step_s: number;
  at_unix_s: number[];
  num_requests: Column;
  num_remote: Column;
  tokens_per_s: Column;
  ttft_p50_ms: Column;
  ttft_p90_ms: Column;
  itl_p50_ms: Column;
  itl_p90_ms: Column;
  queue_p50_ms: Column;
  queue_p90_ms: Column;
  links: Record<string, Column>;
}

interface Props {
  query: Query;
  /** Unix seconds of the oldest request that is kept. */
  oldest: number | null;
  onChange: (query: Query) => void;
}

const MEDIAN: Line[] = [
  { label: "median", colour: COLOURS[0]!, width: 2 },
  { label: "90 of 100", colour: COLOURS[1]! },
];

export function RequestCharts({ query, oldest, onChange }: Props) {
  const [series, setSeries] = useState<Series | null>(null);
  useEffect(() => {
    const load = () => {
      if (document.hidden) return;
      const until = Math.ceil(Date.now() / 1000);
      const time = { since: Math.floor(Math.min(oldest ?? until, until - HOUR_S)), until, ...stretch(query) };
      get<Series>(`api/requests/series?${asked(query, time)}`)
        .then(setSeries)
        .catch(() => undefined); // the list says so
    };
    load();
    if (query.until) return;
    const timer = setInterval(load, LOOK_MS);
    return () => clearInterval(timer);
  }, [query, oldest == null]);
  const select = (from: number, to: number) =>
    onChange({ ...query, since: `${Math.floor(from)}`, until: `${Math.ceil(to)}` });
  if (!series) return null;
  const links = Object.keys(series.links);
  const times = { yFormat: duration, steps: DURATION_STEPS, lines: MEDIAN, dots: true };
  const common = { x: series.at_unix_s, onSelect: select };
  return (
    <details class="figures-over-time" open={WIDE.matches || undefined}>
      <summary>Figures over time</summary>
      <div class="charts requests-charts">
      <One {...common} title="TTFT, time to first token" {...times} columns={[series.ttft_p50_ms, series.ttft_p90_ms]} />
      <One {...common} title="ITL, time between two tokens" {...times} columns={[series.itl_p50_ms, series.itl_p90_ms]} />
      <One {...common} title="Queue, until engines were chosen" {...times} columns={[series.queue_p50_ms, series.queue_p90_ms]} />
      <One
        {...common}
        title="Output tokens a second"
        lines={[{ label: "tokens/s", colour: COLOURS[2]!, fill: true }]}
        columns={[series.tokens_per_s]}
        yFormat={short}
      />
      <One
        {...common}
        title={`Requests in ${duration(series.step_s * 1000)}`}
        lines={[
          { label: "all", colour: COLOURS[4]!, fill: true },
          { label: "offloaded", colour: COLOURS[0]! },
        ]}
        columns={[series.num_requests, series.num_remote]}
        yFormat={whole}
        format={count}
      />
      {links.length > 0 && (
        <One
          {...common}
          title="Share of the link budget"
          lines={links.map((label, index) => ({ label, colour: COLOURS[index % COLOURS.length]! }))}
          columns={Object.values(series.links)}
          yFormat={percent}
          least={0.1}
        />
      )}
      </div>
    </details>
  );
}

interface OneProps {
  title: string;
  x: number[];
  columns: Column[];
  lines: Line[];
  onSelect: (from: number, to: number) => void;
  yFormat: (value: number) => string;
  format?: (value: number) => string;
  steps?: number[];
  least?: number;
  dots?: boolean;
}

function One({ x, columns, ...rest }: OneProps) {
  const data = useMemo(() => [x, ...columns] as [number[], ...Column[]], [x, ...columns]);
  return <Chart {...rest} data={data} time height={130} sync="requests" place={x.length - 1} />;
}
