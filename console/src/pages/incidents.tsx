// What has happened: a list, and one incident with its time line.

import { useEffect, useState } from "preact/hooks";
import { get, type Incident, type IncidentPage, type State } from "../api";
import { clock, duration } from "../format";
import { Words } from "../parts/alarms";

const AGAIN_MS = 5000;
const LIMIT = 200;
const SPANS: [string, number][] = [
  ["last hour", 3600],
  ["last day", 86400],
  ["last 7 days", 7 * 86400],
  ["last 30 days", 30 * 86400],
];
const KINDS = [
  "engine",
  "pool",
  "link",
  "breaker",
  "member",
  "threshold",
  "admission",
  "operator",
  "certificate",
  "requests",
  "plan",
  "gateway",
];

/** Asks now and again, while the page is open. */
function useAsked<T>(path: string): [T | null, string] {
  const [found, setFound] = useState<[string, T] | null>(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    let isOver = false;
    const ask = () =>
      get<T>(path).then(
        (answer) => {
          if (isOver) return;
          setFound([path, answer]);
          setProblem("");
        },
        (error: Error) => !isOver && setProblem(error.message),
      );
    void ask();
    const timer = setInterval(() => void ask(), AGAIN_MS);
    return () => {
      isOver = true;
      clearInterval(timer);
    };
  }, [path]);
  return [found?.[0] === path ? found[1] : null, problem];
}

function day(unixS: number): string {
  const at = new Date(unixS * 1000);
  const today = new Date().toDateString() === at.toDateString();
  return today ? clock(unixS) : `${at.toLocaleDateString()} ${clock(unixS)}`;
}

function lasted(incident: Incident): string {
  if (incident.ended_at == null) return "open";
  return incident.ended_at === incident.began_at
    ? "–"
    : duration((incident.ended_at - incident.began_at) * 1000);
}

export function Incidents({ state }: { state: State | null }) {
  const [span, setSpan] = useState(86400);
  const [kind, setKind] = useState("");
  const [severity, setSeverity] = useState("alarms");
  const [words, setWords] = useState("");
  // Rounded, so that the address does not change with every picture.
  const since = Math.floor((Date.now() / 1000 - span) / 60) * 60;
  const query = `since=${since}&limit=${LIMIT}${kind && `&kind=${kind}`}`;
  const [page, problem] = useAsked<IncidentPage>(`../control/incidents?${query}`);
  const shown = (page?.incidents ?? []).filter(
    (each) =>
      (severity === "all" || each.severity !== "note") &&
      `${each.title} ${each.cause}`.toLowerCase().includes(words.toLowerCase()),
  );
  return (
    <>
      <h1>Incidents</h1>
      <form class="filters" onSubmit={(event) => event.preventDefault()}>
        <label>
          Time{" "}
          <select value={span} onChange={(e) => setSpan(Number(e.currentTarget.value))}>
            {SPANS.map(([name, seconds]) => (
              <option value={seconds}>{name}</option>
            ))}
          </select>
        </label>
        <label>
          Kind{" "}
          <select value={kind} onChange={(e) => setKind(e.currentTarget.value)}>
            <option value="">all kinds</option>
            {KINDS.map((name) => (
              <option>{name}</option>
            ))}
          </select>
        </label>
        <label>
          Show{" "}
          <select value={severity} onChange={(e) => setSeverity(e.currentTarget.value)}>
            <option value="alarms">what went wrong</option>
            <option value="all">changes as well</option>
          </select>
        </label>
        <label>
          Find{" "}
          <input
            type="search"
            value={words}
            placeholder="part or cause"
            onInput={(e) => setWords(e.currentTarget.value)}
          />
        </label>
      </form>
      {problem && (
        <p class="lost" role="alert">
          {problem}
        </p>
      )}
      {page?.why_unwritten && (
        <p class="lost" role="alert">
          The log cannot be written, and a restart would forget the last incidents: {page.why_unwritten}
        </p>
      )}
      {page && !shown.length && (
        <p class="quiet">
          No incidents. They are kept for {page.days_kept} days
          {state && state.alarms.length > 0 ? "; an alarm becomes one after a moment." : "."}
        </p>
      )}
      {shown.length > 0 && (
        <div class="scroll">
          <table class="incidents">
            <thead>
              <tr>
                <th>began</th>
                <th>lasted</th>
                <th>what</th>
                <th class="number">requests</th>
              </tr>
            </thead>
            <tbody>
              {shown.map((each) => (
                <tr key={each.id} class={each.severity}>
                  <td>{day(each.began_at)}</td>
                  <td>{lasted(each)}</td>
                  <td class="wraps">
                    <a href={`#/incidents/${each.id}`}>{each.title}</a>
                    <small>{each.cause}</small>
                  </td>
                  <td class="number">{each.num_requests || ""}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {page && page.incidents.length >= LIMIT && (
        <p class="quiet">The newest {LIMIT}; choose a kind or a shorter time for others.</p>
      )}
    </>
  );
}

export function OneIncident({ id }: { id: string }) {
  const [found, problem] = useAsked<Incident>(`../control/incidents/${encodeURIComponent(id)}`);
  const [copied, setCopied] = useState("");
  if (!found)
    return problem ? (
      <p class="lost" role="alert">
        {problem}
      </p>
    ) : (
      <p class="quiet">Reading…</p>
    );
  const copy = () =>
    navigator.clipboard
      ? navigator.clipboard.writeText(found.text ?? "").then(
          () => setCopied("copied"),
          () => setCopied("the browser refused; select the text below"),
        )
      : setCopied("this page is not on HTTPS or localhost; select the text below");
  const until = found.ended_at == null ? "" : `&to=${Math.ceil(found.ended_at)}`;
  return (
    <>
      <p>
        <a href="#/incidents">All incidents</a>
      </p>
      <h1>
        {found.title} <span class={`badge ${found.severity}`}>{found.severity}</span>
      </h1>
      <dl class="told">
        <dt>What</dt>
        <dd>{found.what}</dd>
        <dt>When</dt>
        <dd>{found.when}</dd>
        <dt>Whom</dt>
        <dd>{found.whom}</dd>
        <dt>What the system did</dt>
        <dd>
          <Words text={found.did ?? ""} />
        </dd>
        {found.todo && (
          <>
            <dt>What to do</dt>
            <dd>
              <Words text={found.todo} /> Steps: <code>{found.runbook}</code>
            </dd>
          </>
        )}
      </dl>
      <p class="buttons">
        <a class="button" href={`#/requests?from=${Math.floor(found.began_at)}${until}`}>
          Requests of this time
        </a>{" "}
        <button type="button" onClick={copy}>
          Copy as text
        </button>{" "}
        <span role="status">{copied}</span>
      </p>
      {found.steps && found.steps.length > 0 && (
        <>
          <h2>Time line, in your time zone</h2>
          <ol class="steps">
            <li>
              <time>{day(found.began_at)}</time> {found.cause}
            </li>
            {found.steps.map((step) => (
              <li>
                <time>{day(step.at)}</time> {step.text}
              </li>
            ))}
          </ol>
          {found.num_steps! > found.steps.length && (
            <p class="quiet">{found.num_steps! - found.steps.length} steps in between are not kept.</p>
          )}
        </>
      )}
      {found.requests && found.requests.length > 0 && (
        <>
          <h2>Requests</h2>
          <ul class="ids">
            {found.requests.map((request) => (
              <li>
                <a href={`#/requests/${encodeURIComponent(request)}`}>{request}</a>
              </li>
            ))}
          </ul>
          {found.num_requests > found.requests.length && (
            <p class="quiet">
              The first {found.requests.length} of {found.num_requests}.
            </p>
          )}
        </>
      )}
      <details>
        <summary>As text</summary>
        <pre>{found.text}</pre>
      </details>
    </>
  );
}
