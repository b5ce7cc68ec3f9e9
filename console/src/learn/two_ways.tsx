// One prompt, read here and read there, on one time axis.

import { useEffect, useRef, useState } from "preact/hooks";
import type { Data, OneRow } from "./data";
import { seconds, tokens, useFrames, useWidth } from "./time";
import { Choice } from "./widgets";

const ROW = 30;
/** Height of a block, px per Gbit/s: with its width, the time, its area is its bytes. */
const PER_GBIT = 4.2;
const FIRST_LENGTH = 27;
/** Ends of the time axis, ms: lengths that fit share one, so that what takes longer is longer. */
const SCALES = [4000, 26_000, 90_000, 400_000];

export function TwoWays({ data }: { data: Data["one"] }) {
  const [index, setIndex] = useState(FIRST_LENGTH);
  const [model, setModel] = useState("hybrid");
  const [line, setLine] = useState("5");
  const rows = data.models[model]!.links[line]!;
  const row = rows[index]!;
  const length = data.lengths[index]!;
  const here = row[0].at(-1)!;
  const there = row[4];
  const gain = here - there;
  const goes = rows.map((each) => each[0].at(-1)! - each[4] > 0);
  const first = goes.indexOf(true);
  return (
    <>
      <div class="controls">
        <label class="long-slider">
          <span>
            Prompt: <b class="out">{tokens(length)} tokens</b> <small>{pages(length)}</small>
          </span>
          <input
            type="range"
            min={0}
            max={data.lengths.length - 1}
            value={index}
            aria-valuetext={`${tokens(length)} tokens`}
            style={{ "--cut": `${first < 0 ? 100 : (Math.max(first - 0.5, 0) / (rows.length - 1)) * 100}%` }}
            class="sides"
            onInput={(event) => setIndex(Number(event.currentTarget.value))}
          />
          <span class="ends">
            <span>{first === 0 ? "" : "faster here"}</span>
            <span>{first < 0 ? "" : "faster there"}</span>
          </span>
        </label>
        <Choice
          label="Model"
          options={[
            ["hybrid", "hybrid: short notes"],
            ["dense", "dense: long notes"],
          ]}
          value={model}
          onChange={setModel}
        />
        <Choice
          label="Line (1 Gbit/s carries 125 MB a second)"
          options={Object.keys(data.models[model]!.links).sort((a, b) => Number(a) - Number(b)).map((key) => [key, `${key} Gbit/s`])}
          value={line}
          onChange={setLine}
        />
        <p class="quiet">
          {model === "hybrid" ? (
            <>
              <b>Hybrid</b>: few of the model's layers take notes on every token, the others keep a summary of fixed
              size.
            </>
          ) : (
            <>
              <b>Dense</b>: every layer of the model takes notes on every token: many times more to send.
            </>
          )}
        </p>
      </div>
      <Lanes row={row} gbits={Number(line)} stamp={`${model}/${line}/${index}`} />
      <p class="reading" aria-live="polite">
        {tokens(length)} tokens leave <b>{size(row[3])}</b> of notes.{" "}
        {gain > 0 ? (
          <>
            Read there, the answer begins after {seconds(there)} instead of {seconds(here)}:{" "}
            <b class="there">going saves {seconds(gain)}.</b>
          </>
        ) : (
          <>
            Read here, the answer begins after {seconds(here)}; read there, after {seconds(there)}:{" "}
            <b class="here">staying saves {seconds(-gain)}.</b>
          </>
        )}
      </p>
    </>
  );
}

const pages = (length: number) => {
  const count = length / 660;
  return count < 1.5 ? "a page" : `${count < 10 ? Math.round(count) : Math.round(count / 10) * 10} pages`;
};

const size = (bytes: number) => (bytes < 1e9 ? `${Math.round(bytes / 1e6)} MB` : `${(bytes / 1e9).toFixed(1)} GB`);

function Lanes({ row, gbits, stamp }: { row: OneRow; gbits: number; stamp: string }) {
  const [place, width] = useWidth<HTMLDivElement>();
  const now = useRef<SVGTextElement>(null);
  const playhead = useRef<SVGRectElement>(null);
  const needle = useRef<SVGLineElement>(null);
  const passed = useRef(1);
  const [local, far, flights, , arrives] = row;
  const here = local.at(-1)!;
  const longest = Math.max(here, arrives) * 1.05;
  const end = SCALES.find((each) => each >= longest) ?? longest;
  const x = (ms: number) => 2 + (ms / end) * (width - 4);
  const high = Math.max(gbits * PER_GBIT, 3);
  const top = { here: 24, there: 112, line: 112 + ROW + 20, answer: 112 + ROW + 20 + high + 8 };
  const bottom = top.answer + 26;
  const play = () => (passed.current = 0);
  useEffect(() => void (passed.current = 1), [stamp]);
  const frames = useFrames((elapsed) => {
    passed.current = Math.min(passed.current + elapsed / 4, 1);
    const to = String(passed.current >= 1 ? width : x(passed.current * end));
    playhead.current?.setAttribute("width", to);
    needle.current?.setAttribute("x1", to);
    needle.current?.setAttribute("x2", to);
    now.current?.setAttribute("x", to);
    for (const each of [needle, now]) each.current?.setAttribute("opacity", passed.current >= 1 ? "0" : "1");
  });
  const sooner = `${seconds(Math.abs(here - arrives))} sooner ${here > arrives ? "there" : "here"}`;
  // Letters of a bold 14 px are at most 8.6 px wide.
  const half = sooner.length * 4.3;
  const [from, to] = [x(Math.min(here, arrives)), x(Math.max(here, arrives))];
  const hasRoom = (at: number) => width - x(at) > 78;
  const parts = (
    <>
      {local.map((to, i) => (
        <rect class="b-local" x={x(local[i - 1] ?? 0) + 1} width={Math.max(x(to) - x(local[i - 1] ?? 0) - 2, 1)} y={top.here} height={ROW} rx="4" />
      ))}
      <rect class="b-write" x={x(here) + 1} width={Math.max(width - x(here), 0)} y={top.here} height={ROW} rx="4" />
      {far.map((to, i) => (
        <rect class="b-remote" x={x(far[i - 1] ?? 0) + 1} width={Math.max(x(to) - x(far[i - 1] ?? 0) - 2, 1)} y={top.there} height={ROW} rx="4" />
      ))}
      {far.map((to, i) => {
        const [from, until] = [flights[2 * i]!, flights[2 * i + 1]!];
        return (
          <>
            <line class="drop" x1={x(to)} y1={top.there + ROW} x2={x(from)} y2={top.line} />
            <rect class="b-block" x={x(from)} width={Math.max(x(until) - x(from) - 1, 1.5)} y={top.line} height={high} />
          </>
        );
      })}
      <rect class="b-write" x={x(arrives) + 1} width={Math.max(width - x(arrives), 0)} y={top.answer} height={22} rx="4" />
    </>
  );
  const step = niceStep(end / (width < 500 ? 4 : 8));
  const ticks = Array.from({ length: Math.floor(end / step) + 1 }, (_, i) => i * step);
  return (
    <div ref={frames}>
      <div ref={place} class="lanes">
        {width > 0 && (
          <svg width={width} height={bottom + 42} role="img" aria-label="Two lanes on one time axis: the prompt read here, and read there with its notes sent in blocks">
            <defs>
              <clipPath id="passed">
                <rect ref={playhead} x="0" y="0" width={width} height={bottom} />
              </clipPath>
            </defs>
            {ticks.map((ms) => (
              <>
                <line class="grid" x1={x(ms)} x2={x(ms)} y1={14} y2={bottom} />
                <text class="tick" x={Math.min(x(ms), width - 18)} y={bottom + 16} text-anchor={ms ? "middle" : "start"}>
                  {step < 1000 ? (ms / 1000).toFixed(1) : Math.round(ms / 1000)} s
                </text>
              </>
            ))}
            <text class="lane here" x="2" y="15">
              Here: slower machines <tspan class="soft">read, then write</tspan>
            </text>
            <text class="lane there" x="2" y="103">
              There: faster machines <tspan class="soft">read and send</tspan>
            </text>
            <text class="soft" x="2" y={top.line - 6}>
              the line
            </text>
            <g opacity="0.22">{parts}</g>
            <g clip-path="url(#passed)">
              {parts}
              {hasRoom(here) && (
                <text class="inside" x={x(here) + 9} y={top.here + 20}>
                  writes
                </text>
              )}
              {hasRoom(arrives) && (
                <text class="inside" x={x(arrives) + 9} y={top.answer + 15}>
                  writes
                </text>
              )}
            </g>
            <text class="soft" x={2} y={top.answer + 15}>
              {x(arrives) > 120 ? "back here" : ""}
            </text>
            <text class="soft" x={width - 2} y={bottom + 36} text-anchor="end">
              {width < 500 ? "" : "after the prompt came; "}this scale ends at {end / 1000} s
            </text>
            <line ref={needle} class="needle" x1={width} x2={width} y1={14} y2={bottom + 20} opacity="0" />
            <text ref={now} class="now" y={bottom + 35} text-anchor="middle" opacity="0">
              now
            </text>
            <line class="mark here" x1={x(here)} x2={x(here)} y1={top.here} y2={bottom} />
            <line class="mark there" x1={x(arrives)} x2={x(arrives)} y1={top.here + ROW + 4} y2={bottom} />
            <path class="bracket" d={`M${from} 59v10M${to} 59v10M${from} 64H${to}${to - from > 16 ? "M" + (from + 7) + " 60l-6 4 6 4" : ""}`} />
            <text class="gap" x={Math.min(Math.max((from + to) / 2, half), width - half)} y="84" text-anchor="middle">
              {sooner}
            </text>
          </svg>
        )}
      </div>
      <p class="play">
        <button type="button" onClick={play}>
          ▶ Play
        </button>
        <span class="key">
          <i class="k-local" /> reading here <i class="k-remote" /> reading there <i class="k-block" /> notes on the
          line (the larger, the more data) <i class="k-write" /> writing
        </span>
      </p>
    </div>
  );
}

function niceStep(ms: number): number {
  for (const step of [100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 30_000]) if (step >= ms) return step;
  return 60_000;
}
