// This deployment, now: the same picture from live requests, or from a file of a simulation.

import { useEffect, useRef, useState } from "preact/hooks";
import { follow, type RequestRecord, type State } from "../api";
import type { System } from "./data";
import { countsAt, type Prompt } from "./prompts";
import { Sites } from "./sites";
import { tokens } from "./time";
import { Choice } from "./widgets";

/** Live requests are shown so much later, to be seen coming. */
const BEHIND_MS = 2500;
const KEPT_MS = 120_000;
const FILE_SPEED = 5;

interface Run {
  name: string;
  system: System;
  prompts: Prompt[];
  /** Kind, start and end, ms. */
  faults: [string, number, number][];
}

export function Now({ isServed }: { isServed: boolean }) {
  const [runs, setRuns] = useState<Run[] | null>(null);
  const [error, setError] = useState("");
  const open = async (file: File | undefined) => {
    if (!file) return;
    try {
      setRuns(read(await file.text()));
      setError("");
    } catch {
      setError(`${file.name} holds no events; make some: prfaas simulate FILE --events events.jsonl`);
    }
  };
  return (
    <>
      {runs ? <Recorded runs={runs} /> : isServed ? <Live /> : <Absent />}
      <p class="controls">
        <label class="button">
          Open a simulation…
          <input type="file" accept=".jsonl,.json,.txt" onChange={(event) => void open(event.currentTarget.files?.[0])} />
        </label>
        {runs && (
          <button type="button" onClick={() => setRuns(null)}>
            Close it
          </button>
        )}
        <span class="quiet">
          The file of <code>prfaas simulate FILE --events events.jsonl</code>; it stays in the browser.
        </span>
      </p>
      {error && (
        <p class="reading bad" role="alert">
          {error}
        </p>
      )}
    </>
  );
}

function Absent() {
  return (
    <p class="reading">
      This page is open from a file. Where a gateway serves it, at <code>/console/learn.html</code>, this picture shows
      the requests of that deployment as they come; a click on one opens its explanation. To try it:{" "}
      <code>prfaas demo</code>.
    </p>
  );
}

function Live() {
  const [state, setState] = useState<State | null>(null);
  const [lost, setLost] = useState("");
  const seen = useRef(new Map<string, Prompt>());
  const offset = useRef(0);
  useEffect(
    () =>
      follow((next) => {
        offset.current = next.at * 1000 - performance.now();
        for (const record of next.requests) {
          const prompt = seen.current.get(record.request_id);
          if (prompt) Object.assign(prompt, live(record));
          else seen.current.set(record.request_id, live(record));
        }
        for (const [id, prompt] of seen.current) if (prompt.at < next.at * 1000 - KEPT_MS) seen.current.delete(id);
        setState(next);
        setLost("");
      }, setLost, () => setLost("sign in to the console first")),
    [],
  );
  if (!state) return <p class="reading">{lost ? `Nothing from the gateway: ${lost}.` : "Waiting for the gateway…"}</p>;
  const engines = (role: string) => state.clusters.filter((c) => c.role === role).flatMap((c) => c.engines);
  const links = Object.values(state.sample.links);
  const routed = links.filter((link) => link.offload_threshold != null);
  const threshold = routed[0]?.offload_threshold ?? 131_072;
  const isCut = routed.length > 0 && routed.every((link) => !link.up);
  const isDown = engines("prfaas").some((engine) => !engine.is_ready);
  const shown = [...seen.current.values()].sort((a, b) => a.at - b.at);
  const counts = countsAt(shown, state.at * 1000 - BEHIND_MS);
  return (
    <>
      <Sites
        label="Requests of this deployment, as they come"
        onPick={(prompt) => prompt.id && location.assign(`./#/requests/${encodeURIComponent(prompt.id)}`)}
        sight={() => [
          {
            prompts: shown,
            threshold,
            numThere: Math.max(engines("prfaas").length, 1),
            numHere: Math.max(engines("pd").length, 1),
            slots: 0,
            trouble: isCut ? "cut" : isDown ? "engine" : "",
            lead: BEHIND_MS,
            speed: 1,
          },
          performance.now() + offset.current - BEHIND_MS,
        ]}
      />
      <p class="reading">
        {state.model}, policy <i>{state.policy}</i>, threshold {tokens(threshold)} new tokens. {counts.waitThere + counts.readThere} prompts there,{" "}
        {counts.onLine} on the line,{" "}
        {counts.waitHere + counts.readHere} here, {counts.writing} being answered.{" "}
        {shown.length ? "Click on one to see why it went where it went." : "No request has come in the last two minutes."}
      </p>
    </>
  );
}

function live(record: RequestRecord): Prompt {
  const begun = record.decided_ms;
  const isThere = record.path === "remote";
  const first = record.ttft_ms;
  const prefill = isThere ? record.prefill_ms : first != null && begun != null ? first - begun : null;
  const way = isThere && first != null && begun != null && prefill != null ? Math.max(first - begun - prefill, 0) : isThere ? null : 0;
  const isOver = record.outcome !== "running";
  const end = isOver ? 0 : null;
  return {
    at: record.started_at * 1000,
    tokens: Math.max(record.num_prompt_tokens, 1),
    cached: Math.max(record.num_prompt_tokens - (record.num_new_tokens ?? record.num_prompt_tokens), 0),
    path: record.fallback ? "fell" : isThere ? "remote" : "local",
    failed: isOver && record.outcome !== "finished",
    parts: [0, begun ?? end, prefill ?? end, way ?? end, record.e2e_ms != null && first != null ? record.e2e_ms - first : end],
    id: record.request_id,
  };
}

function Recorded({ runs }: { runs: Run[] }) {
  const [name, setName] = useState(runs[0]!.name);
  const run = runs.find((each) => each.name === name)!;
  const at = useRef(0);
  const end = (run.prompts.at(-1)?.at ?? 0) + 30_000;
  return (
    <>
      {runs.length > 1 && <Choice label="Policy" options={runs.map((each) => [each.name, each.name])} value={name} onChange={setName} />}
      <Sites
        label="Requests of a simulation"
        sight={(elapsed) => {
          at.current = (at.current + elapsed * 1000 * FILE_SPEED) % end;
          return [
            {
              prompts: run.prompts,
              threshold: run.system.threshold,
              numThere: run.system.prfaas,
              numHere: run.system.prefill,
              slots: run.system.slots,
              trouble: run.faults.find(([, from, to]) => from <= at.current && at.current < to)?.[0] ?? "",
              lead: 2000 * FILE_SPEED,
              speed: FILE_SPEED,
            },
            at.current,
          ];
        }}
      />
    </>
  );
}

/** Runs of a file of events: src/prfaas/sim/report/events.py. */
export function read(text: string): Run[] {
  const found: Run[] = [];
  for (const line of text.split("\n")) {
    if (!line) continue;
    const value = JSON.parse(line) as Record<string, unknown> | unknown[];
    if (!Array.isArray(value)) {
      if (typeof value.run === "string") found.push({ name: value.run, system: value as unknown as System, prompts: [], faults: [] });
      continue;
    }
    if (typeof value[0] !== "number") {
      const [kind, from, length, , left] = value as [string, number, number, number, number];
      const name = kind === "link" ? (left > 0 ? "half" : "cut") : kind === "prfaas" ? "engine" : "";
      found.at(-1)!.faults.push([name, from, from + length]);
      continue;
    }
    const [at, length, cached, path, ...parts] = value as [number, number, number, string, ...(number | null)[]];
    const [lost, queue, prefill, transfer, admission, decode] = parts;
    found.at(-1)!.prompts.push({
      at,
      tokens: Math.max(length, 1),
      cached: Math.min(cached, length - 1),
      path: path.startsWith("R") ? "remote" : path.startsWith("F") ? "fell" : "local",
      failed: path.length > 1,
      parts: [lost ?? 0, queue ?? 0, prefill ?? 0, (transfer ?? 0) + (admission ?? 0), decode ?? 0],
    });
  }
  if (!found.length) throw new Error("no runs");
  return found;
}
