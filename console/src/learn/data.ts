// What the planner and the simulator found: benchmarks/explanation.py.

import type { Prompt } from "./prompts";

/** Ends of local chunks, ends of remote chunks, start and end of each block's flight, bytes, and when the answer begins remotely; ms. */
export type OneRow = [number[], number[], number[], number, number];

export interface System {
  threshold: number;
  prefill: number;
  decode: number;
  slots: number;
  prfaas: number;
}

export interface Data {
  one: {
    lengths: number[];
    models: Record<string, { name: string; links: Record<string, OneRow[]> }>;
  };
  many: {
    system: System;
    lead_s: number;
    span_s: number;
    target_s: number;
    rate_per_s: number;
    link_bits_per_s: number;
    optimum: number;
    arrivals: number[];
    runs: { threshold: number; in_time: number; load: [number, number, number]; requests: (number | null)[] }[];
  };
  trouble: {
    span_s: number;
    system: System;
    clips: Record<string, Clip>;
  };
  yours: {
    models: string[];
    fleets: [number, boolean][];
    bits_per_s: number[];
    medians: number[];
    templates: string[];
    answers: number[];
  };
}

export interface Clip {
  from_s: number;
  to_s: number;
  arrivals: number[];
  runs: Record<string, { in_time: number; errors: number; requests: (number | null)[] }>;
}

const TICK_MS = 50;
const BLOCK_TOKENS = 512;
/** 1,024 tokens at 25 ms each, as in the case study. */
const DECODE_MS = 25_600;

export async function unpack(): Promise<Data> {
  if (import.meta.env.DEV) return (await import("./data.json")).default as unknown as Data;
  const text = document.getElementById("data")!.textContent!;
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Response(stream).json() as Promise<Data>;
}

/** Prompts of a packed run: see `packed` and `arrivals` in benchmarks/explanation.py. */
export function prompts(arrivals: number[], requests: (number | null)[]): Prompt[] {
  const found: Prompt[] = [];
  let at = 0;
  for (let i = 0; i * 2 < arrivals.length; i++) {
    at += arrivals[i * 2]!;
    const [cached, code, ...parts] = requests.slice(i * 6, i * 6 + 6);
    const [lost, queue, prefill, wait] = parts.map((ticks) => (ticks == null ? null : ticks * TICK_MS));
    found.push({
      at: at * TICK_MS,
      tokens: arrivals[i * 2 + 1]!,
      cached: Math.min(cached! * BLOCK_TOKENS, arrivals[i * 2 + 1]! - 1),
      path: (["local", "remote", "fell"] as const)[code! % 3]!,
      failed: code! > 2,
      parts: [lost ?? null, queue ?? null, prefill ?? null, wait ?? null, code! > 2 ? null : DECODE_MS],
    });
  }
  return found;
}
