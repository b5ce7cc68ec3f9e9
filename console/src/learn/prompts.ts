// A prompt and where it is at an instant. Recorded, simulated and live prompts have the same form.

export interface Prompt {
  /** Its arrival, ms. */
  at: number;
  tokens: number;
  cached: number;
  path: "local" | "remote" | "fell";
  failed: boolean;
  /** Lost on a route that was left, in a queue, being read, on its way to decode, being answered; ms,
   * null where it has not ended yet. */
  parts: (number | null)[];
  /** Of a live request. */
  id?: string;
}

export const STAGES = ["lost", "queue", "read", "way", "write"] as const;
export type Stage = (typeof STAGES)[number];

/** The stage of a prompt at an instant, and how much of it is over, 0 to 1; null before and after. */
export function stageOf(prompt: Prompt, at: number): [Stage, number] | null {
  let left = at - prompt.at;
  if (left < 0) return null;
  for (let i = 0; i < STAGES.length; i++) {
    const part = prompt.parts[i];
    if (part == null) return [STAGES[i]!, Math.min(left / 10_000, 0.9)];
    if (left < part) return [STAGES[i]!, left / part];
    left -= part;
  }
  return null;
}

/** Arrival to the first token, ms; null where there is none yet. */
export function firstToken(prompt: Prompt): number | null {
  let sum = 0;
  for (const part of prompt.parts.slice(0, 4)) {
    if (part == null) return null;
    sum += part;
  }
  return sum;
}

export const newTokens = (prompt: Prompt) => prompt.tokens - prompt.cached;

export interface Counts {
  waitHere: number;
  readHere: number;
  waitThere: number;
  readThere: number;
  onLine: number;
  writing: number;
}

export function countsAt(prompts: Prompt[], at: number): Counts {
  const found = { waitHere: 0, readHere: 0, waitThere: 0, readThere: 0, onLine: 0, writing: 0 };
  for (const prompt of prompts) {
    if (prompt.at > at) break;
    const stage = stageOf(prompt, at)?.[0];
    if (!stage) continue;
    const isThere = prompt.path === "remote" || stage === "lost";
    if (stage === "write") found.writing++;
    else if (stage === "way") found.onLine += isThere ? 1 : 0;
    else if (stage === "read") found[isThere ? "readThere" : "readHere"]++;
    else found[isThere ? "waitThere" : "waitHere"]++;
  }
  return found;
}

/** Of the prompts that came before an instant and should have an answer by now: the share in time. */
export function inTime(prompts: Prompt[], at: number, targetMs: number): number | null {
  let came = 0;
  let good = 0;
  for (const prompt of prompts) {
    if (prompt.at + targetMs > at) break;
    came++;
    const first = firstToken(prompt);
    if (!prompt.failed && first != null && first <= targetMs) good++;
  }
  return came ? good / came : null;
}
