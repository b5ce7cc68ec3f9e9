// Requests as rows, of which only those on the screen exist; a row leads to its waterfall.

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import type { RequestRecord } from "../api";
import { clock, count, duration } from "../format";

const NARROW = matchMedia("(max-width: 760px)");
const ROW_PX = 37;
/** With the reason below. */
const NARROW_ROW_PX = 88;
/** Rows beyond the edges of the screen that exist. */
const SPARE = 12;

interface Props {
  requests: RequestRecord[];
  /** Called while the last rows are near. */
  onEnd?: () => void;
  /** Called with the rows that exist. */
  onShown?: (shown: RequestRecord[]) => void;
}

export function RequestTable({ requests, onEnd, onShown }: Props) {
  const place = useRef<HTMLDivElement>(null);
  const row = useRowHeight();
  const [first, num] = useWindow(place, row, requests.length);
  const last = Math.min(first + num, requests.length);
  const shown = requests.slice(first, last);
  useEffect(() => onShown?.(shown), [first, last, requests]);
  useEffect(() => {
    if (last >= requests.length - SPARE) onEnd?.();
  }, [last, requests.length]);
  if (!requests.length) return <p class="empty">None yet. Those to come are listed with why they went where they went.</p>;
  return (
    <div class="requests" role="table" aria-label="Requests" aria-rowcount={requests.length + 1}>
      <div class="row head" role="row" aria-rowindex={1}>
        <span role="columnheader">time</span>
        <span role="columnheader">path</span>
        <span role="columnheader" class="why">
          why
        </span>
        <span role="columnheader" class="number">
          prompt
        </span>
        <span role="columnheader" class="number wide">
          cached
        </span>
        <span role="columnheader" class="number" title="time to first token; only streams have one">
          TTFT
        </span>
        <span role="columnheader" class="number wide" title="from the request's arrival to the last byte of its answer">
          whole
        </span>
        <span role="columnheader" class="outcome">
          outcome
        </span>
      </div>
      <div class="body" role="rowgroup" ref={place} style={{ height: `${requests.length * row}px` }}>
        {shown.map((request, index) => (
          <Row
            key={request.number ?? request.request_id + request.started_at}
            request={request}
            index={first + index}
            height={row}
          />
        ))}
      </div>
    </div>
  );
}

function useRowHeight(): number {
  const [isNarrow, setNarrow] = useState(NARROW.matches);
  useEffect(() => {
    const changed = () => setNarrow(NARROW.matches);
    NARROW.addEventListener("change", changed);
    return () => NARROW.removeEventListener("change", changed);
  }, []);
  return isNarrow ? NARROW_ROW_PX : ROW_PX;
}

/** The first row that exists and how many do, in steps, so that not each pixel draws them anew. */
function useWindow(place: { current: HTMLElement | null }, row: number, total: number): [number, number] {
  const [first, setFirst] = useState(0);
  const num = Math.ceil(innerHeight / row) + 2 * SPARE;
  useLayoutEffect(() => {
    const look = () => {
      if (!place.current) return;
      const above = Math.floor(-place.current.getBoundingClientRect().top / row) - SPARE;
      const half = SPARE / 2;
      setFirst(Math.max(0, Math.min(Math.floor(above / half) * half, total - 1)));
    };
    look();
    addEventListener("scroll", look, { passive: true });
    addEventListener("resize", look);
    return () => {
      removeEventListener("scroll", look);
      removeEventListener("resize", look);
    };
  }, [row, total]);
  return [first, num];
}

/** The path it took, in a word: one that was refused took none. */
export function pathOf(request: RequestRecord): string {
  return request.refusal ? "refused" : request.path;
}

/** Why it went where it went, or what it was answered with instead. */
export function why(request: RequestRecord): string {
  return request.refusal ?? request.explanation ?? request.error ?? "not decided yet";
}

/** What was not usual about it, as badges. */
export function Course({ request }: { request: RequestRecord }) {
  const last = request.fallbacks.at(-1);
  return (
    <>
      {request.course
        .filter((word) => word !== "refused")
        .map((word) => (
          <span class={`course ${word.replace(" ", "-")}`} title={last && `${last.stage}: ${last.reason}`}>
            {word}
          </span>
        ))}
    </>
  );
}

function Row({ request, index, height }: { request: RequestRecord; index: number; height: number }) {
  const reason = why(request);
  return (
    <div
      class={`row ${request.refusal ? "refused" : request.outcome}`}
      role="row"
      aria-rowindex={index + 2}
      style={{ transform: `translateY(${index * height}px)`, height: `${height}px` }}
    >
      <span role="cell">
        <a href={`#/requests/${encodeURIComponent(request.request_id)}`}>{clock(request.started_at)}</a>
      </span>
      <span role="cell">
        <span class={`path ${pathOf(request)}`}>{pathOf(request)}</span>
      </span>
      <span role="cell" class="why" title={reason}>
        {reason}
      </span>
      <span role="cell" class="number">
        {count(request.num_prompt_tokens)}
      </span>
      <span role="cell" class="number wide">
        {count(request.cached_tokens)}
      </span>
      <span role="cell" class="number">
        {duration(request.ttft_ms)}
      </span>
      <span role="cell" class="number wide">
        {duration(request.e2e_ms)}
      </span>
      <span role="cell" class="outcome">
        {request.outcome} <Course request={request} />
      </span>
    </div>
  );
}
