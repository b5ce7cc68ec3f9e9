// Incidents as marks on every chart with a time axis: a mark opens its incident.

import { useEffect, useState } from "preact/hooks";
import type uPlot from "uplot";
import { get } from "./api";
import { clock } from "./format";

export interface Mark {
  id: string;
  title: string;
  severity: "page" | "critical" | "warning" | "note";
  began_at: number;
  /** null while it is open */
  ended_at: number | null;
}

const AGAIN_MS = 5000;
const SPAN_S = 86400;
const NEAR_PX = 6;
const SHOWN = 4;
const COLOURS = { page: "--red", critical: "--red", warning: "--amber", note: "--quiet" };

let known: Mark[] = [];
let timer = 0;
const followers = new Set<(marks: Mark[]) => void>();

async function ask() {
  try {
    const since = Math.floor(Date.now() / 1000) - SPAN_S;
    known = (await get<{ incidents: Mark[] }>(`../control/incidents?since=${since}`)).incidents;
    for (const follower of followers) follower(known);
  } catch {
    // No key yet, or the gateway is gone: the page says so at its top.
  }
}

/** Incidents of the last day, the newest first; asked for once for all charts. */
export function useMarks(wanted: boolean): Mark[] {
  const [marks, setMarks] = useState(known);
  useEffect(() => {
    if (!wanted) return;
    followers.add(setMarks);
    if (!timer) {
      void ask();
      timer = window.setInterval(() => void ask(), AGAIN_MS);
    }
    return () => {
      followers.delete(setMarks);
      if (followers.size) return;
      clearInterval(timer);
      timer = 0;
    };
  }, [wanted]);
  return wanted ? marks : [];
}

function within(u: uPlot, marks: Mark[]): Mark[] {
  const { min, max } = u.scales.x!;
  if (min == null || max == null) return [];
  return marks.filter((m) => m.began_at <= max && (m.ended_at ?? max) >= min);
}

/** Draws a band from begin to end, and a line at the begin. */
export function drawMarks(u: uPlot, marks: Mark[], colourOf: (variable: string) => string): void {
  const { left, top, width, height } = u.bbox;
  const place = (x: number) => Math.min(Math.max(u.valToPos(x, "x", true), left), left + width);
  const colours = new Map<string, string>();
  u.ctx.save();
  for (const mark of within(u, marks)) {
    const variable = COLOURS[mark.severity];
    const colour = colours.get(variable) ?? colourOf(variable);
    colours.set(variable, colour);
    const from = place(mark.began_at);
    const to = mark.ended_at == null ? left + width : place(mark.ended_at);
    u.ctx.fillStyle = u.ctx.strokeStyle = colour;
    u.ctx.globalAlpha = 0.12;
    if (mark.severity !== "note") u.ctx.fillRect(from, top, Math.max(to - from, 2), height);
    u.ctx.globalAlpha = 0.9;
    u.ctx.fillRect(from, top, 2, height);
    u.ctx.beginPath();
    u.ctx.moveTo(from - 5, top);
    u.ctx.lineTo(from + 7, top);
    u.ctx.lineTo(from + 1, top + 9);
    u.ctx.fill();
  }
  u.ctx.restore();
}

/** Opens the incident whose mark is under the cursor. */
export function openMark(u: uPlot, marks: Mark[]): void {
  const at = u.cursor.left ?? -1;
  if (at < 0) return;
  const near = within(u, marks).find(
    (m) => Math.abs(u.valToPos(m.began_at, "x") - at) <= NEAR_PX,
  );
  if (near) location.hash = `#/incidents/${near.id}`;
}

/** The marks of a chart as links: for the keyboard, for fingers, and for who does not see. */
export function MarkLinks({ marks, from, to }: { marks: Mark[]; from: number; to: number }) {
  const shown = marks.filter((m) => m.began_at <= to && (m.ended_at ?? to) >= from);
  if (!shown.length) return null;
  return (
    <p class="marks">
      {shown.slice(0, SHOWN).map((mark) => (
        <a key={mark.id} href={`#/incidents/${mark.id}`} class={mark.severity}>
          ▾ {clock(mark.began_at)} {mark.title}
        </a>
      ))}
      {shown.length > SHOWN && <a href="#/incidents">{shown.length - SHOWN} more</a>}
    </p>
  );
}
