// What the gateway says, and how it is asked. The Python side: prfaas/gateway/console.

export interface LinkSample {
  up: boolean;
  goodput_bits_per_s: number;
  rtt_ms: number;
  queued_bytes: number;
  in_flight_bytes: number;
  /** null between hosts of the PD cluster */
  offload_threshold: number | null;
  /** KV cache that arrived over it since the gateway started. */
  kv_bytes: number;
  /** Price of these bytes, in the currency of the plan; null where the plan has none. */
  cost: number | null;
  /** Bytes delivered, averaged over five seconds. */
  carried_bits_per_s: number;
  /** What the operator allows; 0 is no limit. */
  budget_bits_per_s: number;
}

/** Seconds that `carried_bits_per_s` is averaged over: prfaas/gateway/console/link_rate.py. */
export const CARRIED_OVER_S = 5;

export interface Sample {
  at_unix_s: number;
  num_in_flight: number;
  num_remote: number;
  num_local: number;
  num_refused: number;
  num_fallbacks: number;
  kv_bytes: number;
  links: Record<string, LinkSample>;
}

export interface EngineState {
  name: string;
  pool: string;
  is_ready: boolean;
  is_drained: boolean;
  breaker: string;
  /** "prefill", "decode" or "both". */
  role: string;
  num_in_flight: number;
  num_waiting: number | null;
  num_running: number | null;
  kv_use: number | null;
}

export interface PoolState {
  name: string;
  is_live: boolean;
  index_state: string;
  num_blocks: number;
  /** Blocks of transfers that nobody has loaded yet. */
  num_leased: number;
  /** Bytes of these, in memory. */
  leased_bytes: number;
  tiers: TierUse[];
}

export interface TierUse {
  /** "host" or "disk". */
  name: string;
  used_bytes: number;
  capacity_bytes: number;
  num_blocks: number;
}

export interface ClusterState {
  name: string;
  role: "prfaas" | "pd";
  is_on: boolean;
  engines: EngineState[];
  pools: PoolState[];
}

export interface Alarm {
  name: string;
  subject: string;
  severity: "warning" | "critical" | "page";
  text: string;
  title: string;
  /** What the operator does about it. */
  todo: string;
  /** Page of the documentation. */
  runbook: string;
  since: number | null;
  /** Id of its incident; null in its first moments. */
  incident: string | null;
}

/** Something that happened; the last fields only of one that is asked for. */
export interface Incident {
  id: string;
  name: string;
  title: string;
  kind: string;
  subject: string;
  severity: "page" | "critical" | "warning" | "note";
  began_at: number;
  /** null while it is open */
  ended_at: number | null;
  cause: string;
  num_requests: number;
  num_tenants: number;
  todo: string;
  runbook: string;
  what?: string;
  when?: string;
  whom?: string;
  did?: string;
  requests?: string[];
  steps?: { at: number; text: string }[];
  num_steps?: number;
  text?: string;
}

export interface IncidentPage {
  incidents: Incident[];
  days_kept: number;
  /** Why the log cannot be written; empty if it can. */
  why_unwritten: string;
}

/** What a loop or an operator changed. */
export interface Change {
  number: number;
  at_unix_s: number;
  loop: string;
  action: string;
  what: string;
  old: number | string | null;
  new: number | string | null;
  why: string;
  /** Name of the operator's key; empty for a loop. */
  operator: string;
}

export interface Candidate {
  engine: string;
  where: string;
  dropped: string | null;
  score: number;
  wait_ms: number | null;
  hit_tokens: number;
  num_open: number;
}

export interface Explanation {
  candidates: Candidate[];
}

export interface PathStatistics {
  num_requests: number;
  ttft_p50_ms: number | null;
  ttft_p90_ms: number | null;
}

export interface RequestRecord {
  /** Counts up from the start of the gateway; only in lists of the page Requests. */
  number?: number;
  request_id: string;
  tenant: string;
  api: string;
  stream: boolean;
  started_at: number;
  outcome: string;
  path: string;
  reason: string | null;
  explanation: string | null;
  refusal: string | null;
  error: string | null;
  offload_threshold: number | null;
  predicted_local_ms: number | null;
  predicted_remote_ms: number | null;
  num_prompt_tokens: number;
  num_new_tokens: number | null;
  num_output_tokens: number;
  cached_tokens: number | null;
  pd_hit_tokens: number;
  prfaas_hit_tokens: number;
  pull_tokens: number;
  pulled_tokens: number | null;
  transfer_state: string | null;
  kv_bytes: number;
  transfer_ms: number | null;
  decided_ms: number | null;
  prefill_ms: number | null;
  ttft_ms: number | null;
  second_ms?: number | null;
  first_token_from?: string | null;
  why_not_early?: string | null;
  relayed_tokens?: number;
  why_not_relay?: string | null;
  gap_ms?: number | null;
  e2e_ms: number | null;
  prefill_cluster: string | null;
  prefill_engine: string | null;
  prefilled_by?: string | null;
  decode_engine: string | null;
  source_pool: string | null;
  destination_pool: string | null;
  fallback: { stage: string; reason: string } | null;
  /** Each time that its route was left or did not pay off, and why. */
  fallbacks: { at_ms: number; stage: string; reason: string; why: string }[];
  /** What was not usual: "refused", "hedged", "fell back", "retried", "continued". */
  course: string[];
  /** Empty where nothing records a trace. */
  trace_id: string;
}

/** Who uses this page. */
export interface Session {
  /** False where the gateway has no operator keys. */
  needs_key: boolean;
  /** Name of the operator's key; null where nobody has signed in. */
  operator: string | null;
  /** "view" or "change"; null where nothing is open to this browser. */
  rank: string | null;
  /** Address of a trace, with {trace_id}. */
  trace_page: string | null;
}

export interface State {
  at: number;
  model: string;
  policy: string;
  loops: { frozen: boolean; threshold: boolean; admission: boolean };
  clusters: ClusterState[];
  sample: Sample;
  recent: {
    window_s: number;
    num_requests: number;
    num_finished: number;
    num_long: number;
    paths: Record<"local" | "remote", PathStatistics>;
  };
  alarms: Alarm[];
  changes: Change[];
  requests: RequestRecord[];
}

export interface Curve {
  x: number[];
  prfaas: (number | null)[];
  pd_prefill: (number | null)[];
  decode: (number | null)[];
  rate: (number | null)[];
}

export interface Design {
  name: string;
  rate_per_s: number;
  price_per_mtoken: number | null;
  offload_threshold: number | null;
  num_prefill: number;
  num_decode: number;
  offload_fraction: number;
  egress_bits_per_s: number;
  binding: string;
}

export interface Latency {
  mean: number | null;
  p50: number | null;
  p90: number | null;
  p99: number | null;
}

export interface WhatIf {
  /** Whether the plan is the deployment's own; else it is the paper's case study. */
  is_own: boolean;
  settings: Record<string, number | null>;
  num_pd: number;
  plan: {
    title: string;
    verdict: { answer: string; sentence: string };
    exact: { gain_at_equal_cost: number; designs: Design[] };
    latency: { overlapped: Record<string, Latency>; queued: Record<string, Latency> };
    break_even_bits_per_s: number | null;
  };
  threshold: Curve;
  split: Curve;
}

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

async function checked(response: Response): Promise<Response> {
  if (response.ok) return response;
  const text = await response.text();
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (JSON.parse(text) as { error: { message: string } }).error.message;
  } catch {
    // Not the gateway's own error: the status has to do.
  }
  throw new ApiError(response.status, message);
}

export async function get<T>(path: string): Promise<T> {
  return (await checked(await fetch(path))).json() as Promise<T>;
}

export async function post<T>(path: string, body: unknown, signal?: AbortSignal): Promise<T> {
  const sent: RequestInit = {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  };
  if (signal) sent.signal = signal;
  return (await checked(await fetch(path, sent))).json() as Promise<T>;
}

export async function signOut(): Promise<void> {
  await checked(await fetch("api/session", { method: "DELETE" }));
}

/**
 * Follow the state. Not EventSource, which does not tell why it was refused.
 *
 * @returns Stops following.
 */
export function follow(
  onState: (state: State) => void,
  onLost: (why: string) => void,
  onSignedOut: () => void,
): () => void {
  const stopped = new AbortController();
  void (async () => {
    while (!stopped.signal.aborted) {
      try {
        await read(stopped.signal, onState);
        onLost("the gateway closed the connection");
      } catch (error) {
        if (stopped.signal.aborted) return;
        if (error instanceof ApiError && error.status === 401) return onSignedOut();
        onLost(error instanceof Error ? error.message : String(error));
      }
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  })();
  return () => stopped.abort();
}

async function read(signal: AbortSignal, onState: (state: State) => void): Promise<void> {
  const response = await checked(await fetch("api/events", { signal }));
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    pending += value;
    const events = pending.split("\n\n");
    pending = events.pop() ?? "";
    const last = events.pop();
    if (last?.startsWith("data: ")) onState(JSON.parse(last.slice(6)) as State);
  }
}
