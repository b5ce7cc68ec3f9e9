// Requests as rows; a row leads to its waterfall.

import type { RequestRecord } from "../api";
import { clock, count, duration } from "../format";

export function RequestTable({ requests }: { requests: RequestRecord[] }) {
  if (!requests.length) return <p class="empty">None yet. Those to come are listed with why they went where they went.</p>;
  return (
    <div class="scroll">
      <table class="requests">
        <thead>
          <tr>
            <th>time</th>
            <th>path</th>
            <th class="wide">why</th>
            <th class="number">prompt</th>
            <th class="number wide">cached</th>
            <th class="number" title="time to first token; only streams have one">
              TTFT
            </th>
            <th class="number wide" title="from the request's arrival to the last byte of its answer">
              whole
            </th>
            <th>outcome</th>
          </tr>
        </thead>
        <tbody>
          {requests.map((request) => (
            <Row key={request.request_id + request.started_at} request={request} />
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** The path it took, in a word: one that was refused took none. */
export function pathOf(request: RequestRecord): string {
  return request.refusal ? "refused" : request.path;
}

/** Why it went where it went, or what it was answered with instead. */
export function why(request: RequestRecord): string {
  return request.refusal ?? request.explanation ?? request.error ?? "not decided yet";
}

function Row({ request }: { request: RequestRecord }) {
  const address = `#/requests/${encodeURIComponent(request.request_id)}`;
  return (
    <tr onClick={() => (location.hash = address)}>
      <td>
        <a href={address}>{clock(request.started_at)}</a>
      </td>
      <td>
        <span class={`path ${request.path}`}>{pathOf(request)}</span>
      </td>
      <td class="wide wraps" title={request.reason ?? ""}>
        {why(request)}
      </td>
      <td class="number">{count(request.num_prompt_tokens)}</td>
      <td class="number wide">{count(request.cached_tokens)}</td>
      <td class="number">{duration(request.ttft_ms)}</td>
      <td class="number wide">{duration(request.e2e_ms)}</td>
      <td class="wraps">
        {request.outcome}
        {request.fallback && <span class="fell" title={request.fallback.reason}> fell back</span>}
      </td>
    </tr>
  );
}
