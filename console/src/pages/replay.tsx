// The last hour, or a simulation's series, on a time line that can be scrubbed.

import { useMemo, useState } from "preact/hooks";
import { CARRIED_OVER_S, get, type Sample } from "../api";
import { Chart, COLOURS, type Line } from "../chart";
import { clock, count, duration, DURATION_STEPS, rate, size, SIZE_STEPS, whole } from "../format";
import { Slider } from "../parts/slider";

/** Named columns over time, wherever they came from. */
interface Recording {
  title: string;
  /** Seconds, of the day or since the run began. */
  at: number[];
  isClock: boolean;
  groups: { title: string; lines: Line[]; columns: (number | null)[][]; format: (v: number) => string }[];
}

/** What `prfaas simulate --series` writes. */
interface SeriesFile {
  kind: "prfaas-series";
  title: string;
  runs: Record<string, { at_s: number[]; columns: Record<string, number[]> }>;
}

export function Replay() {
  const [recording, setRecording] = useState<Recording | null>(null);
  const [place, setPlace] = useState(0);
  const [error, setError] = useState("");
  const show = (found: Recording) => {
    if (found.at.length < 2) {
      setError("There is less than two seconds to show.");
      return;
    }
    setError("");
    setRecording(found);
    setPlace(found.at.length - 1);
  };
  const lastHour = () =>
    get<{ samples: Sample[] }>("api/history")
      .then((found) => show(fromSamples(found.samples)))
      .catch((problem: Error) => setError(problem.message));
  const file = async (chosen: File | undefined) => {
    if (!chosen) return;
    try {
      show(fromSeries(JSON.parse(await chosen.text()) as SeriesFile));
    } catch {
      setError(`${chosen.name} is no series; make one: prfaas simulate FILE --series series.json`);
    }
  };
  return (
    <section>
      <h2>Replay</h2>
      <div class="filters">
        <button type="button" onClick={lastHour}>
          The last hour
        </button>
        <label class="button">
          A simulation's series…
          <input
            type="file"
            accept=".json,application/json"
            onChange={(event) => void file(event.currentTarget.files?.[0])}
          />
        </label>
      </div>
      {error && <p class="lost">{error}</p>}
      {recording ? (
        <Scrubbed recording={recording} place={place} setPlace={setPlace} />
      ) : (
        <p class="empty">
          Choose what to replay. <code>prfaas simulate FILE --series series.json</code> records a
          simulation.
        </p>
      )}
    </section>
  );
}

interface ScrubbedProps {
  recording: Recording;
  place: number;
  setPlace: (place: number) => void;
}

function Scrubbed({ recording, place, setPlace }: ScrubbedProps) {
  const at = recording.at[place]!;
  const label = recording.isClock ? clock(at) : elapsed(at);
  return (
    <>
      <h3>{recording.title}</h3>
      <Slider
        label="time"
        value={place}
        low={0}
        high={recording.at.length - 1}
        step={1}
        format={() => label}
        onChange={setPlace}
      />
      <div class="charts">
        {recording.groups.map((group) => (
          <One group={group} recording={recording} place={place} />
        ))}
      </div>
    </>
  );
}

interface OneProps {
  group: Recording["groups"][number];
  recording: Recording;
  place: number;
}

function One({ group, recording, place }: OneProps) {
  const data = useMemo(
    () => [recording.at, ...group.columns] as [number[], ...(number | null)[][]],
    [recording],
  );
  return (
    <Chart
      title={group.title}
      lines={group.lines}
      data={data}
      time={recording.isClock}
      yFormat={group.format === count ? whole : group.format}
      format={group.format}
      xFormat={elapsed}
      {...stepsOf(group.format)}
      mark={recording.at[place]!}
      place={place}
    />
  );
}

function stepsOf(format: (value: number) => string): { steps?: number[] } {
  if (format === size) return { steps: SIZE_STEPS };
  return format === duration ? { steps: DURATION_STEPS } : {};
}

/** Seconds since a run began, as minutes and seconds. */
function elapsed(seconds: number): string {
  const whole = Math.round(seconds);
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
}

function fromSamples(samples: Sample[]): Recording {
  const links = Object.keys(samples.at(-1)?.links ?? {});
  const line = (label: string, index: number): Line => ({
    label,
    colour: COLOURS[index % COLOURS.length]!,
  });
  const perSecond = (pick: (s: Sample) => number) =>
    samples.map((s, i) => (i ? pick(s) - pick(samples[i - 1]!) : 0));
  const routed = links.filter((name) => samples.at(-1)!.links[name]!.offload_threshold != null);
  const ofLinks = (pick: (s: Sample["links"][string]) => number | null, names = links) =>
    names.map((name) => samples.map((s) => (s.links[name] ? pick(s.links[name]) : null)));
  return {
    title: "The last hour of this gateway",
    at: samples.map((s) => s.at_unix_s),
    isClock: true,
    groups: [
      {
        title: `delivered, mean of ${CARRIED_OVER_S} s`,
        lines: links.map(line),
        columns: ofLinks((l) => l.carried_bits_per_s),
        format: rate,
      },
      {
        title: "threshold",
        lines: routed.map(line),
        columns: ofLinks((l) => l.offload_threshold, routed),
        format: count,
      },
      {
        title: "in flight",
        lines: [line("in flight", 2)],
        columns: [samples.map((s) => s.num_in_flight)],
        format: count,
      },
      {
        title: "requests ended in a second",
        lines: [line("offloaded", 0), line("local", 1)],
        columns: [perSecond((s) => s.num_remote), perSecond((s) => s.num_local)],
        format: count,
      },
    ],
  };
}

function fromSeries(file: SeriesFile): Recording {
  if (file.kind !== "prfaas-series") throw new Error("no series");
  const runs = Object.entries(file.runs);
  const first = runs[0]![1];
  const lines = runs.map(([label], index) => ({ label, colour: COLOURS[index % COLOURS.length]! }));
  return {
    title: file.title,
    at: first.at_s,
    isClock: false,
    groups: Object.keys(first.columns).map((name) => ({
      title: name.replace(/, (bit\/s|bytes|ms)$/, ""),
      lines,
      columns: runs.map(([, run]) => first.at_s.map((_, i) => run.columns[name]?.[i] ?? null)),
      format: name.endsWith("bit/s") ? rate : name.endsWith("bytes") ? size : name.endsWith(", ms") ? duration : count,
    })),
  };
}
