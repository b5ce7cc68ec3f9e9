// One request: why it went where it went, and where its time went.

import { useContext, useEffect, useState } from "preact/hooks";
import { get, type Candidate, type Explanation, type RequestRecord } from "../api";
import { Course, pathOf, why } from "../parts/request_table";
import { clock, count, duration, rate, size } from "../format";
import { SessionOf } from "../session";
import { listAddress } from "./requests";

const POLL_MS = 1000;

export function OneRequest({ id }: { id: string }) {
  const [request, setRequest] = useState<RequestRecord | null>(null);
  const [error, setError] = useState("");
  useEffect(() => {
    let timer = 0;
    const load = () =>
      get<RequestRecord>(`../control/requests/${encodeURIComponent(id)}`)
        .then((found) => {
          setRequest(found);
          setError("");
          const isOver = found.outcome !== "running" && found.transfer_state !== "open";
          if (!isOver) timer = window.setTimeout(load, POLL_MS);
        })
        .catch((problem: Error) => setError(problem.message));
    void load();
    return () => clearTimeout(timer);
  }, [id]);
  if (error) return <p class="lost">{error}</p>;
  if (!request) return <p class="empty">Looking it up…</p>;
  return (
    <section>
      <p>
        <a href={listAddress()}>← all requests</a>
      </p>
      <h1 class="id">{request.request_id}</h1>
      <p class="why">
        <span class={`path ${pathOf(request)}`}>{pathOf(request)}</span> <Course request={request} />{" "}
        {why(request)}
      </p>
      <Trace id={request.trace_id} />
      <Fallbacks request={request} />
      <Waterfall request={request} />
      <Predictions request={request} />
      <Facts request={request} />
      <Candidates id={id} chosen={[request.prefill_engine, request.decode_engine]} />
    </section>
  );
}

function Trace({ id }: { id: string }) {
  const page = useContext(SessionOf)?.trace_page;
  if (!id) return null;
  if (!page)
    return (
      <p class="quiet">
        trace <code>{id}</code>; with <code>tracing.page</code> in the deployment file this is a link
      </p>
    );
  return (
    <p>
      <a href={page.replace("{trace_id}", id)} rel="noreferrer">
        Trace {id.slice(0, 8)}…
      </a>
    </p>
  );
}

const MEANS: Record<string, string> = {
  prefill: "the prompt was read again by the engine that decodes",
  transfer: "what had not arrived was computed by the engine that decodes",
  pull: "what had not arrived of the prefix was computed",
  decode: "another engine went on",
};

/** Each time that something was given up for it, in order. */
function Fallbacks({ request }: { request: RequestRecord }) {
  if (!request.fallbacks.length) return null;
  return (
    <ol class="fallbacks">
      {request.fallbacks.map((each) => (
        <li>
          <b>{duration(each.at_ms)}</b>: {each.stage} left, {each.reason.replaceAll("_", " ")}; {MEANS[each.stage]}
          {each.why && <small> ({each.why})</small>}
        </li>
      ))}
    </ol>
  );
}

interface Span {
  name: string;
  from: number;
  to: number;
  kind: string;
}

/** Parts of a request on one time line, ms since it came in. */
export function spans(r: RequestRecord): Span[] {
  const end = r.e2e_ms ?? Math.max(r.ttft_ms ?? 0, r.prefill_ms ?? 0);
  const found: Span[] = [];
  const add = (name: string, from: number, to: number, kind: string) =>
    found.push({ name, from, to, kind });
  const begun = r.decided_ms ?? 0;
  const isRefused = r.refusal != null;
  const left = r.fallbacks.find((each) => each.stage === "prefill" || each.stage === "transfer");
  const broke = r.fallbacks.filter((each) => each.stage === "decode").at(-1);
  if (r.decided_ms != null) add("tokens and decision", 0, begun, "decide");
  if (r.path === "remote" && r.prefill_ms != null) {
    const isVain = left?.stage === "prefill";
    const end = isVain ? Math.min(begun + r.prefill_ms, left!.at_ms) : begun + r.prefill_ms;
    add(`prefill, ${r.prefill_engine ?? "remote"}${isVain ? ", left" : ""}`, begun, end, isVain ? "vain" : "prefill");
    // Blocks leave while chunks are computed; the transfer opens with the prefill leg.
    if (r.transfer_ms != null)
      add(`transfer, ${size(r.kv_bytes)}${left ? ", left" : ""}`, begun, begun + r.transfer_ms, left ? "vain" : "transfer");
    const ready = left?.at_ms ?? begun + Math.max(r.prefill_ms, r.transfer_ms ?? 0);
    const token = r.second_ms != null ? "second token" : "first token";
    const decodes = r.second_ms ?? r.ttft_ms;
    if (left && decodes != null && decodes > ready)
      add(`queue and prefill again, ${r.decode_engine ?? "local"}`, ready, decodes, "local");
    else if (decodes != null && decodes > ready) add(token, ready, decodes, "queue");
  } else if (r.ttft_ms != null) {
    // The engine is asked at once, and waits for the prefix while it comes.
    if (r.pull_tokens && r.transfer_ms != null)
      add(`pull, ${size(r.kv_bytes)}`, begun, begun + r.transfer_ms, "transfer");
    add(`queue and prefill, ${r.decode_engine ?? "local"}`, begun, r.ttft_ms, "local");
  }
  const answering = r.second_ms ?? r.ttft_ms ?? Math.max(...found.map((span) => span.to), 0);
  if (isRefused || end <= answering) return found;
  // An answer that is not streamed has no first token of its own: nothing parts prefill from decode.
  const isWhole = r.ttft_ms == null && r.path !== "remote";
  if (broke && !isWhole && broke.at_ms > answering && broke.at_ms < end) {
    add("decode, until its engine broke", answering, broke.at_ms, "vain");
    add(`continued, ${r.decode_engine ?? ""}`, broke.at_ms, end, "decode");
    return found;
  }
  const name = isWhole ? "prefill and decode, not streamed" : "decode";
  add(`${name}, ${r.decode_engine ?? ""}`, answering, end, isWhole ? "whole" : "decode");
  return found;
}

function Waterfall({ request }: { request: RequestRecord }) {
  const found = spans(request);
  const end = Math.max(...found.map((span) => span.to), 0);
  if (!end && request.refusal)
    return <p class="refusal">Refused before it had an engine: {request.error ?? request.refusal}.</p>;
  if (!end) return <p class="empty">No times yet.</p>;
  return (
    <figure class="waterfall" role="img" aria-label="Waterfall of the request">
      {found.map((span) => (
        <div class="row">
          <span class="name">{span.name}</span>
          <span class="track">
            <i
              class={span.kind}
              style={{
                left: `${(span.from / end) * 100}%`,
                width: `${Math.max(((span.to - span.from) / end) * 100, 0.4)}%`,
              }}
            />
            {request.fallbacks.map((each) => (
              <b class="flag" style={{ left: `${Math.min((each.at_ms / end) * 100, 100)}%` }} title={`${each.stage}: ${each.reason}`} />
            ))}
          </span>
          <span class="figure">{duration(span.to - span.from)}</span>
        </div>
      ))}
      <div class="row scale">
        <span class="name" />
        <span class="track">
          <span>0</span>
          <span>{duration(end / 2)}</span>
          <span>{duration(end)}</span>
        </span>
        <span class="figure" />
      </div>
    </figure>
  );
}

function Predictions({ request }: { request: RequestRecord }) {
  const { predicted_local_ms: local, predicted_remote_ms: remote, ttft_ms: real } = request;
  if (local == null && remote == null)
    return (
      <p class="quiet">
        No predictions: the threshold alone decided. A <code>plan</code> in the deployment file
        gives them.
      </p>
    );
  const top = Math.max(local ?? 0, remote ?? 0, real ?? 0);
  const bars: [string, number | null, string][] = [
    ["predicted, local", local, "local"],
    ["predicted, remote", remote, "remote"],
    [`really, ${request.path}`, real, request.path],
  ];
  return (
    <figure class="waterfall">
      <figcaption>Time to first token</figcaption>
      {bars.map(([name, value, kind]) => (
        <div class="row">
          <span class="name">{name}</span>
          <span class="track">
            {value != null && <i class={kind} style={{ width: `${(value / top) * 100}%` }} />}
          </span>
          <span class="figure">{duration(value)}</span>
        </div>
      ))}
    </figure>
  );
}

/** Who was looked at for it, and why one was chosen. */
function Candidates({ id, chosen }: { id: string; chosen: (string | null)[] }) {
  const [found, setFound] = useState<Candidate[]>([]);
  useEffect(() => {
    get<Explanation>(`../control/requests/${encodeURIComponent(id)}/explanation`)
      .then((explanation) => setFound(explanation.candidates))
      .catch(() => undefined);
  }, [id]);
  if (!found.length) return null;
  return (
    <>
      <h3>Engines that were looked at</h3>
      <p class="quiet">
        A score ranks the engines of one cluster. Between clusters the rule above decides.
      </p>
      <div class="scroll" tabIndex={0}>
        <table>
          <thead>
            <tr>
              <th>engine</th>
              <th>where</th>
              <th class="number">score</th>
              <th class="number">wait</th>
              <th class="number">holds</th>
              <th class="number wide">open</th>
            </tr>
          </thead>
          <tbody>
            {found.map((candidate) => (
              <tr class={chosen.includes(candidate.engine) ? "chosen" : ""}>
                <td>
                  {candidate.engine}
                  {chosen.includes(candidate.engine) && <small> chosen</small>}
                </td>
                <td>{candidate.where}</td>
                <td class="number">{candidate.dropped ?? candidate.score.toFixed(2)}</td>
                <td class="number">{duration(candidate.wait_ms)}</td>
                <td class="number">{count(candidate.hit_tokens)}</td>
                <td class="number wide">{candidate.num_open}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}

function pulled(r: RequestRecord): string {
  if (!r.pull_tokens) return "nothing";
  const found = r.pulled_tokens == null ? "" : `, ${count(r.pulled_tokens)} of use`;
  return `${count(r.pull_tokens)} tokens${found}`;
}

/** Tokens of the engine that prefilled, in squares, and of the one that decodes, in dots: one mark for
 * each, at most twenty. */
function origins(early: number, all: number): string {
  const marks = Math.min(20, Math.max(all, early));
  const first = all > 20 ? Math.max(1, Math.round((early / all) * marks)) : early;
  return "■".repeat(Math.min(first, marks)) + "·".repeat(Math.max(0, marks - first));
}

/** Which engine gave the first tokens, and why it was not the one that prefilled. */
function firstToken(r: RequestRecord): string {
  if (r.first_token_from === "prefill") {
    const early = 1 + (r.relayed_tokens ?? 0);
    const all = Math.max(early, r.num_output_tokens);
    const rest = all > early ? `, others from ${r.decode_engine}` : "";
    return `${count(early)} from ${r.prefill_engine}${rest} ${origins(early, all)}`;
  }
  const why = r.why_not_early ? ` (${r.why_not_early})` : "";
  return r.first_token_from ? `${r.decode_engine}${why}` : "–";
}

function Facts({ request: r }: { request: RequestRecord }) {
  const goodput = r.transfer_ms && r.kv_bytes ? (r.kv_bytes * 8e3) / r.transfer_ms : null;
  const facts: [string, string][] = [
    ["came in", clock(r.started_at)],
    ["tenant", r.tenant],
    ["API", `${r.api}${r.stream ? ", streamed" : ""}`],
    ["outcome", r.outcome + (r.fallback ? `, fell back (${r.fallback.stage}: ${r.fallback.reason})` : "")],
    ["prompt", `${count(r.num_prompt_tokens)} tokens`],
    ["not cached", `${count(r.num_new_tokens)} tokens`],
    ["threshold", `${count(r.offload_threshold)} tokens`],
    ["held by the PD cluster", `${count(r.pd_hit_tokens)} tokens`],
    ["held by the PrfaaS cluster", `${count(r.prfaas_hit_tokens)} tokens`],
    ["pulled", pulled(r)],
    ["answer", `${count(r.num_output_tokens)} tokens`],
    ["first token from", firstToken(r)],
    ["prefilled by", r.prefilled_by ?? r.prefill_engine ?? r.decode_engine ?? "–"],
    ["decoded by", r.decode_engine ?? "–"],
    ["transfer", r.transfer_state ? `${r.transfer_state}, ${size(r.kv_bytes)}, ${rate(goodput)}` : "none"],
  ];
  return (
    <dl class="facts">
      {facts.map(([name, value]) => (
        <div>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}
