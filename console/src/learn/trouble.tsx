// Break it: the same trouble under two policies on one time line.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { prompts, type Data } from "./data";
import { countsAt, inTime, type Prompt } from "./prompts";
import { Sites } from "./sites";
import { clock, isStill, useFrames, useWidth } from "./time";
import { Choice } from "./widgets";

const TARGET_MS = 10_000;
const BEGIN_MS = 42_000;
const STEP_MS = 2000;

const EVENTS: Record<string, [string, string, string]> = {
  cut: ["Cut the line", "line cut", "cut"],
  engine: ["Kill an engine", "an engine dies", "engine"],
  half: ["Halve the line", "half of the line", "half"],
  burst: ["Burst", "twice as many prompts", ""],
  warm: ["Warm cache", "most prompts are known already", ""],
};

const POLICIES: Record<string, string> = {
  paper: "a fixed threshold",
  adaptive: "also looks at queues and line",
};

interface Lane {
  name: string;
  prompts: Prompt[];
  waiting: number[];
  errors: number;
}

export function Trouble({ data }: { data: Data["trouble"] }) {
  const [event, setEvent] = useState("cut");
  const [speed, setSpeed] = useState("10");
  const [isRunning, setRunning] = useState(false);
  const [shown, setShown] = useState(BEGIN_MS);
  const at = useRef(BEGIN_MS);
  const clip = data.clips[event]!;
  const span = data.span_s * 1000;
  const lanes = useMemo<Lane[]>(
    () =>
      Object.entries(clip.runs).map(([name, run]) => {
        const found = prompts(clip.arrivals, run.requests);
        const waiting = Array.from({ length: span / STEP_MS + 1 }, (_, i) => {
          const counts = countsAt(found, i * STEP_MS);
          return counts.waitHere + counts.waitThere + counts.onLine;
        });
        return { name, prompts: found, waiting, errors: run.errors };
      }),
    [clip],
  );
  const jump = (ms: number) => {
    at.current = ms;
    setShown(ms);
  };
  useEffect(() => jump(BEGIN_MS), [event]);
  const last = useRef(0);
  const isOn = (ms: number) => ms >= clip.from_s * 1000 && ms < clip.to_s * 1000;
  const advance = (elapsed: number) => {
    if (!isRunning) return;
    at.current = Math.min(at.current + elapsed * 1000 * Number(speed), span);
    if (at.current >= span) setRunning(false);
    if (Math.abs(at.current - last.current) > 100 * Number(speed) || at.current >= span) {
      last.current = at.current;
      setShown(at.current);
    }
  };
  const frames = useFrames(advance);
  const choose = (next: string) => {
    setEvent(next);
    setRunning(!isStill());
  };
  return (
    <>
      <div class="controls breaks" role="group" aria-label="What happens">
        {Object.entries(EVENTS).map(([key, [words]]) => (
          <button type="button" aria-pressed={key === event} onClick={() => choose(key)}>
            {words}
          </button>
        ))}
      </div>
      <div class="pair" ref={frames}>
        {lanes.map((lane) => (
          <figure key={lane.name}>
            <figcaption>
              <b>{lane.name}</b> {POLICIES[lane.name]}
              <span class="tally">
                <span>{percent(inTime(lane.prompts, shown, TARGET_MS))} in time</span>{" "}
                <span class={lane.errors ? "bad" : "good"}>{lane.errors} errors</span>
              </span>
            </figcaption>
            <Sites
              small
              label={`Both sites under ${lane.name}`}
              sight={() => [
                {
                  prompts: lane.prompts,
                  threshold: data.system.threshold,
                  numThere: data.system.prfaas,
                  numHere: data.system.prefill,
                  slots: data.system.slots,
                  trouble: isOn(at.current) ? EVENTS[event]![2] : "",
                  lead: 1200 * Number(speed),
                  speed: Number(speed),
                },
                at.current,
              ]}
            />
          </figure>
        ))}
      </div>
      <TimeLine clip={clip} lanes={lanes} span={span} at={shown} name={EVENTS[event]![1]} onJump={jump} />
      <div class="controls">
        <button type="button" class="strong" onClick={() => (shown >= span ? (jump(BEGIN_MS), setRunning(true)) : setRunning(!isRunning))}>
          {isRunning ? "❚❚ Pause" : "▶ Play"}
        </button>
        <Choice label="Speed" options={["1", "5", "10", "30", "100"].map((n) => [n, `${n}×`])} value={speed} onChange={setSpeed} />
      </div>
      <Story event={event} clip={clip} lanes={lanes} at={shown} isOn={isOn(shown)} />
    </>
  );
}

const percent = (share: number | null) => (share == null ? "–" : `${Math.round(share * 100)} %`);

interface StoryProps {
  event: string;
  clip: Data["trouble"]["clips"][string];
  lanes: Lane[];
  at: number;
  isOn: boolean;
}

/** The moment in words. */
function Story({ event, clip, lanes, at, isOn }: StoryProps) {
  const fell = lanes.map((lane) => lane.prompts.filter((p) => p.path === "fell" && p.at + (p.parts[0] ?? 0) <= at).length);
  const waits = lanes.map((lane) => {
    const counts = countsAt(lane.prompts, at);
    return counts.waitHere + counts.waitThere;
  });
  const when =
    at < clip.from_s * 1000 ? "All is well" : isOn ? `Since ${clock(clip.from_s * 1000)}: ${EVENTS[event]![1]}` : "It is over";
  return (
    <p class="reading">
      {clock(at)}. {when}. {waits[0]} prompts wait under <i>paper</i>, {waits[1]} under <i>adaptive</i>.
      {fell.some(Boolean) && (
        <>
          {" "}
          <b class="bad">
            {fell[0]} and {fell[1]} prompts (red)
          </b>{" "}
          were on their way and fell back: they were read again elsewhere.
        </>
      )}{" "}
      Nobody got an error.
    </p>
  );
}

interface TimeLineProps {
  clip: Data["trouble"]["clips"][string];
  lanes: Lane[];
  span: number;
  at: number;
  name: string;
  onJump: (ms: number) => void;
}

const TALL = 118;

function TimeLine({ clip, lanes, span, at, name, onJump }: TimeLineProps) {
  const [place, width] = useWidth<HTMLDivElement>();
  const most = Math.max(...lanes.flatMap((lane) => lane.waiting), 10);
  const x = (ms: number) => (ms / span) * width;
  const y = (count: number) => TALL - 20 - (count / most) * (TALL - 48);
  const [from, to] = [clip.from_s * 1000, clip.to_s * 1000];
  return (
    <div class="time-line" ref={place}>
      {width > 0 && (
        <svg width={width} height={TALL} role="img" aria-label="Prompts that wait, over time, under both policies">
          <rect class="during" x={x(from)} width={x(to) - x(from)} y="20" height={TALL - 40} />
          <path class="flag" d={`M${x(from)} ${TALL - 20}V6h${Math.min(width * 0.4, 12)}l-4 5 4 5h-12`} />
          <text class="flag-name" x={x(from) + 16} y="16">
            {name}
          </text>
          {lanes.map((lane) => (
            <polyline class={`waiting ${lane.name}`} points={lane.waiting.map((count, i) => `${x(i * STEP_MS)},${y(count)}`).join(" ")} />
          ))}
          <line class="needle" x1={x(at)} x2={x(at)} y1="4" y2={TALL - 20} />
          <text class="tick" x="0" y={TALL - 4}>
            0:00
          </text>
          <text class="tick" x={width} y={TALL - 4} text-anchor="end">
            {clock(span)}
          </text>
        </svg>
      )}
      <input
        type="range"
        aria-label="Time"
        aria-valuetext={clock(at)}
        min={0}
        max={span}
        step={1000}
        value={at}
        onInput={(event) => onJump(Number(event.currentTarget.value))}
      />
      <p class="key">
        prompts that wait: <i class="k-paper" /> paper <i class="k-adaptive" /> adaptive
      </p>
    </div>
  );
}
