// Many prompts and one threshold: the visitor searches the best one.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { prompts, type Data } from "./data";
import { countsAt } from "./prompts";
import { Sites } from "./sites";
import { isStill, tokens, useWidth } from "./time";
import { Gauge } from "./widgets";

const SPEED = 6;
const FIRST = 10;
const TRIES = 4;

export function Many({ data }: { data: Data["many"] }) {
  const [index, setIndex] = useState(FIRST);
  const [tried, setTried] = useState<number[]>([FIRST]);
  const [isRunning, setRunning] = useState(!isStill());
  const runs = useMemo(() => data.runs.map((run) => prompts(data.arrivals, run.requests)), [data]);
  const at = useRef(data.lead_s * 1000 + 40_000);
  const [shown, setShown] = useState(at.current);
  const run = data.runs[index]!;
  const end = (data.lead_s + data.span_s) * 1000;
  useEffect(() => {
    // A place counts as tried once the handle rests there.
    const rests = setTimeout(() => setTried((old) => (old.includes(index) ? old : [...old, index])), 700);
    return () => clearTimeout(rests);
  }, [index]);
  const best = data.runs.findIndex((each) => each.threshold >= data.optimum);
  const isFound =
    tried.length >= TRIES && tried.some((each) => each < best) && tried.some((each) => each > best);
  const [here, there, write] = run.load;
  const share = Math.round(run.in_time * 100);
  const counts = countsAt(runs[index]!, shown);
  const last = useRef(0);
  return (
    <>
      <div class="score">
        <p>
          <b class={share > 80 ? "good" : share > 40 ? "" : "bad"}>{share} of 100</b> prompts get the
          first word within {data.target_s} s
        </p>
        <div class="gauges">
          <Gauge name="Reading here" load={here / 100} words={`${here} % busy`} tone="local" />
          <Gauge name="Reading there, and line" load={there / 100} words={`${there} % busy`} tone="remote" />
          <Gauge name="Writing" load={write / 100} words={`${write} % busy`} tone="writing" />
          <div class="gauge scale" aria-hidden="true">
            <span />
            <span>
              <i>100 %</i>
            </span>
          </div>
        </div>
      </div>
      <div class="controls close">
        <label class="long-slider">
          <span>
            Threshold: send away prompts with more than <b class="out">{tokens(run.threshold)} new tokens</b>
          </span>
          <input
            type="range"
            min={0}
            max={data.runs.length - 1}
            value={index}
            aria-valuetext={`${tokens(run.threshold)} tokens`}
            onInput={(event) => setIndex(Number(event.currentTarget.value))}
          />
          <span class="ends">
            <span>nearly all go</span>
            <span>nearly all stay</span>
          </span>
        </label>
        <button type="button" onClick={() => setRunning(!isRunning)}>
          {isRunning ? "❚❚ Pause" : "▶ Run"}
        </button>
      </div>
      <Sites
        label="Prompts arrive at the left, long ones at the top. Those above the threshold go to the remote site, the others to the local one; each waits, is read, and is answered locally."
        onPull={(length) => setIndex(nearest(data, length))}
        sight={(elapsed) => {
          if (isRunning) at.current += elapsed * 1000 * SPEED;
          if (at.current > end) at.current = data.lead_s * 1000;
          if (Math.abs(at.current - last.current) > 2000) {
            last.current = at.current;
            setShown(at.current);
          }
          return [
            {
              prompts: runs[index]!,
              threshold: run.threshold,
              numThere: data.system.prfaas,
              numHere: data.system.prefill,
              slots: data.system.slots,
              trouble: "",
              lead: 12_000,
              speed: SPEED,
            },
            at.current,
          ];
        }}
      />
      <p class="key">
        a prompt, the larger the more there is to read: <i class="k-prompt" /> <i class="k-prompt rim" /> rim: known
        already <i class="k-ring" /> ring: a machine reads it <i class="k-square" /> notes on the line{" "}
        <i class="k-dot" /> an answer being written
      </p>
      <p class="reading">
        Now {counts.waitThere} prompts wait to be read there and {counts.waitHere} here; {counts.writing} answers are
        being written.{" "}
        {there > 95
          ? "The remote site gets more than it can read."
          : here > 100
            ? "The local machines get more than they can read."
            : "Both sides keep up."}
      </p>
      <Search data={data} tried={tried} index={index} isFound={isFound} onPick={setIndex} />
    </>
  );
}

function nearest(data: Data["many"], length: number): number {
  const far = data.runs.map((run) => Math.abs(Math.log(run.threshold / length)));
  return far.indexOf(Math.min(...far));
}

interface SearchProps {
  data: Data["many"];
  tried: number[];
  index: number;
  isFound: boolean;
  onPick: (index: number) => void;
}

const HIGH = 120;

/** What the visitor has tried; the planner's answer once both sides of it were. */
function Search({ data, tried, index, isFound, onPick }: SearchProps) {
  const [place, width] = useWidth<HTMLDivElement>();
  const low = Math.log(data.runs[0]!.threshold);
  const high = Math.log(data.runs.at(-1)!.threshold);
  const x = (length: number) => 20 + ((Math.log(length) - low) / (high - low)) * (width - 44);
  const y = (share: number) => HIGH - 22 - share * (HIGH - 44);
  const known = data.runs.map((run, i) => ({ run, i })).filter(({ i }) => isFound || tried.includes(i));
  return (
    <div class="search">
      <p>
        <b>Your search: prompts in time, of 100, by threshold.</b>{" "}
        {isFound ? (
          <>
            The planner computes a best place from the speed of the machines and of the line, without trying:{" "}
            <b>{tokens(data.optimum)} tokens</b>.{" "}
            <button type="button" class="plain" onClick={() => onPick(data.runs.findIndex((r) => r.threshold === data.optimum))}>
              Go there
            </button>
          </>
        ) : (
          <>
            Each threshold that you try leaves a point. Find the top: try both sides
            {tried.length > 1 ? `, ${tried.length} tried` : ""}.
          </>
        )}
      </p>
      <div ref={place}>
        {width > 0 && (
          <svg width={width} height={HIGH} role="img" aria-label="Share of prompts in time against the threshold, as far as tried">
            {[0, 0.5, 1].map((share) => (
              <>
                <line class="grid" x1="20" x2={width - 24} y1={y(share)} y2={y(share)} />
                <text class="tick" x={width - 22} y={y(share) + 4}>
                  {share * 100}
                </text>
              </>
            ))}
            {known.length > 1 && (
              <polyline class="curve" points={known.map(({ run }) => `${x(run.threshold)},${y(run.in_time)}`).join(" ")} />
            )}
            {known.map(({ run, i }) => (
              <circle class={i === index ? "dot now" : "dot"} cx={x(run.threshold)} cy={y(run.in_time)} r={i === index ? 7 : 4.5} />
            ))}
            {isFound && (
              <>
                <line class="mark best" x1={x(data.optimum)} x2={x(data.optimum)} y1="6" y2={HIGH - 20} />
                <text class="tick best" x={x(data.optimum) - 6} y="14" text-anchor="end">
                  the planner
                </text>
              </>
            )}
            <text class="tick" x="20" y={HIGH - 4}>
              {tokens(data.runs[0]!.threshold)}: lower threshold
            </text>
            <text class="tick" x={width - 24} y={HIGH - 4} text-anchor="end">
              higher: {tokens(data.runs.at(-1)!.threshold)}
            </text>
          </svg>
        )}
      </div>
    </div>
  );
}
