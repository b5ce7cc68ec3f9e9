// Break it: the same trouble under two policies on one time line.

import type { ComponentChildren } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { prompts, type Data } from "./data";
import { countsAt, firstToken, inTime, type Prompt } from "./prompts";
import { Sites } from "./sites";
import { clock, isStill, useFrames, useWidth } from "./time";
import { Choice } from "./widgets";

const TARGET_MS = 10_000;
/** A clip plays from so long before the fault; where nothing moves, it shows a moment so long after. */
const BEFORE_MS = 14_000;
const AFTER_MS = 40_000;
const STEP_MS = 2000;

interface Fault {
  button: string;
  /** What the picture shows of it. */
  trouble: string;
  during: string;
  begins: string;
  ends: string;
}

const FAULTS: Record<string, Fault> = {
  cut: {
    button: "Cut the line",
    trouble: "cut",
    during: "The line is cut: everything is read here.",
    begins: "line cut",
    ends: "line back",
  },
  engine: {
    button: "Kill a machine",
    trouble: "engine",
    during: "A machine there is dead: its prompts are read again.",
    begins: "machine dies",
    ends: "machine back",
  },
  half: {
    button: "Halve the line",
    trouble: "half",
    during: "Half of the line is left: notes arrive later.",
    begins: "line halved",
    ends: "line whole",
  },
  burst: {
    button: "Burst",
    trouble: "",
    during: "Twice as many prompts come.",
    begins: "burst begins",
    ends: "burst over",
  },
  warm: {
    button: "Warm cache",
    trouble: "",
    during: "Most of each prompt is known already.",
    begins: "cache warm",
    ends: "as before",
  },
};

/** The simulator's names of the policies, and the page's. */
const POLICIES: Record<string, [string, string]> = {
  paper: ["fixed", "the paper's rule: one threshold"],
  adaptive: ["adaptive", "also looks at queues and line"],
};

interface Lane {
  name: string;
  prompts: Prompt[];
  waiting: number[];
  errors: number;
}

export function Trouble({ data, children }: { data: Data["trouble"]; children: ComponentChildren }) {
  const [event, setEvent] = useState("cut");
  const [speed, setSpeed] = useState("10");
  const [isRunning, setRunning] = useState(false);
  const [isChosen, setChosen] = useState(false);
  const [policy, setPolicy] = useState("adaptive");
  const clip = data.clips[event]!;
  const begin = clip.from_s * 1000 + (isStill() ? AFTER_MS : -BEFORE_MS);
  const [shown, setShown] = useState(begin);
  const at = useRef(begin);
  const fault = FAULTS[event]!;
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
  useEffect(() => {
    if (isStill()) return;
    const watcher = new IntersectionObserver(
      ([entry]) => {
        if (!entry!.isIntersecting) return;
        watcher.disconnect();
        setRunning(true);
      },
      { threshold: 0.5 },
    );
    watcher.observe(frames.current!);
    return () => watcher.disconnect();
  }, []);
  const choose = (next: string) => {
    setEvent(next);
    setChosen(true);
    jump(data.clips[next]!.from_s * 1000 + (isStill() ? AFTER_MS : -BEFORE_MS));
    setRunning(!isStill());
  };
  const play = () => {
    if (shown >= span) jump(clip.from_s * 1000 - BEFORE_MS);
    setRunning(shown >= span || !isRunning);
  };
  return (
    <>
      <div class="controls breaks" role="group" aria-label="What happens">
        {Object.entries(FAULTS).map(([key, { button }]) => (
          <button
            type="button"
            aria-pressed={key === event && (isChosen || shown >= clip.from_s * 1000)}
            onClick={() => choose(key)}
          >
            {button}
          </button>
        ))}
        <i class="row" />
        <span class="at">
          <button type="button" class="strong" onClick={play}>
            {isRunning ? "❚❚ Pause" : "▶ Play"}
          </button>
          <b class="clock">{clock(shown)}</b>
        </span>
        <div class="narrow">
          <Choice label="Policy" options={Object.entries(POLICIES).map(([key, [name]]) => [key, name])} value={policy} onChange={setPolicy} />
        </div>
      </div>
      <div class="pair" ref={frames}>
        {lanes.map((lane) => (
          <figure key={lane.name} class={lane.name === policy ? "" : "other"}>
            <figcaption>
              <b>{POLICIES[lane.name]![0]}</b>: {POLICIES[lane.name]![1]}
              <span class="tally">
                <span>{percent(inTime(lane.prompts, shown, TARGET_MS))} in time</span>{" "}
                <span class={lane.errors ? "bad" : "good"}>{lane.errors} errors</span>
              </span>
            </figcaption>
            <p class={`words ${isOn(shown) ? "on" : ""}`}>
              {isOn(shown) ? (
                <>
                  {fault.during} <b>{late(lane, clip.from_s * 1000, shown)} waited longer</b> than 10 s,{" "}
                  <b>{lane.errors} lost</b>.
                </>
              ) : shown < clip.from_s * 1000 ? (
                `All is well until ${clock(clip.from_s * 1000)}.`
              ) : (
                <>
                  It is over. <b>{late(lane, clip.from_s * 1000, shown)} waited longer</b> than 10 s since{" "}
                  {clock(clip.from_s * 1000)}, <b>{lane.errors} lost</b>.
                </>
              )}
            </p>
            <Sites
              small
              label={`Both sites, ${POLICIES[lane.name]![0]} policy`}
              sight={() => [
                {
                  prompts: lane.prompts,
                  threshold: data.system.threshold,
                  numThere: data.system.prfaas,
                  numHere: data.system.prefill,
                  slots: data.system.slots,
                  trouble: isOn(at.current) ? fault.trouble : "",
                  lead: 1200 * Number(speed),
                  speed: Number(speed),
                },
                at.current,
              ]}
            />
          </figure>
        ))}
      </div>
      {children}
      <TimeLine clip={clip} lanes={lanes} span={span} at={shown} fault={fault} onJump={jump} />
      <div class="controls">
        <Choice label="Speed" options={["1", "5", "10", "30", "100"].map((n) => [n, `${n}×`])} value={speed} onChange={setSpeed} />
      </div>
      <Story fault={fault} clip={clip} lanes={lanes} at={shown} isOn={isOn(shown)} />
    </>
  );
}

/** Prompts that came since an instant and waited longer for their first word than they should. */
const late = (lane: Lane, from: number, at: number) =>
  lane.prompts.filter((p) => p.at >= from && p.at + TARGET_MS < at && (firstToken(p) ?? Infinity) > TARGET_MS).length;

const percent = (share: number | null) => (share == null ? "–" : `${Math.round(share * 100)} %`);

interface StoryProps {
  fault: Fault;
  clip: Data["trouble"]["clips"][string];
  lanes: Lane[];
  at: number;
  isOn: boolean;
}

/** The moment in words. */
function Story({ fault, clip, lanes, at, isOn }: StoryProps) {
  const fell = lanes.map((lane) => lane.prompts.filter((p) => p.path === "fell" && p.at + (p.parts[0] ?? 0) <= at).length);
  const waits = lanes.map((lane) => {
    const counts = countsAt(lane.prompts, at);
    return counts.waitHere + counts.waitThere;
  });
  const when =
    at < clip.from_s * 1000 ? "All is well" : isOn ? `Since ${clock(clip.from_s * 1000)}: ${fault.begins}` : "It is over";
  return (
    <p class="reading">
      {clock(at)}. {when}. {waits[0]} prompts wait under <i>fixed</i>, {waits[1]} under <i>adaptive</i>.
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
  fault: Fault;
  onJump: (ms: number) => void;
}

const TALL = 150;
/** Room for the numbers at the left, px. */
const AXIS = 34;

function TimeLine({ clip, lanes, span, at, fault, onJump }: TimeLineProps) {
  const [place, width] = useWidth<HTMLDivElement>();
  const most = Math.max(...lanes.flatMap((lane) => lane.waiting), 10);
  const x = (ms: number) => AXIS + (ms / span) * (width - AXIS);
  const y = (count: number) => TALL - 20 - (count / most) * (TALL - 66);
  const step = [5, 10, 20, 50, 100, 200, 500].find((each) => most / each < 4.5) ?? 1000;
  const ticks = Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
  const [from, to] = [clip.from_s * 1000, clip.to_s * 1000];
  return (
    <div class="time-line trouble-line" ref={place}>
      {width > 0 && (
        <svg width={width} height={TALL} role="img" aria-label="Prompts that wait, over time, under both policies">
          <text class="soft" x="0" y="12">
            prompts that wait
          </text>
          {ticks.map((count) => (
            <>
              <line class="grid" x1={AXIS} x2={width} y1={y(count)} y2={y(count)} />
              <text class="tick" x={AXIS - 6} y={y(count) + 4} text-anchor="end">
                {count}
              </text>
            </>
          ))}
          <rect class="during" x={x(from)} width={x(to) - x(from)} y="38" height={TALL - 58} />
          <path class="flag" d={`M${x(from)} ${TALL - 20}V24h-12l4 5-4 5h12`} />
          <text class="flag-name" x={x(from) - 16} y="34" text-anchor="end">
            {fault.begins}
          </text>
          <path class="flag over" d={`M${x(to)} ${TALL - 20}V24h12l-4 5 4 5h-12`} />
          <text class="flag-name over" x={x(to) + 16} y="34">
            {fault.ends}
          </text>
          {lanes.map((lane) => (
            <polyline class={`waiting ${lane.name}`} points={lane.waiting.map((count, i) => `${x(i * STEP_MS)},${y(count)}`).join(" ")} />
          ))}
          <line class="needle" x1={x(at)} x2={x(at)} y1="20" y2={TALL - 20} />
          <text class="tick" x={AXIS} y={TALL - 4}>
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
        style={{ marginLeft: AXIS, width: `calc(100% - ${AXIS}px)` }}
        aria-valuetext={clock(at)}
        min={0}
        max={span}
        step={1000}
        value={at}
        onInput={(event) => onJump(Number(event.currentTarget.value))}
      />
      <p class="key">
        <i class="k-paper" /> fixed policy <i class="k-adaptive" /> adaptive policy
      </p>
    </div>
  );
}
