// The last requests, filtered.

import { useEffect, useMemo, useState } from "preact/hooks";
import { get, type RequestRecord, type State } from "../api";
import { RequestTable } from "../parts/request_table";

const LIMIT = 200;
const PATHS = ["all", "remote", "local", "none"];

export function Requests({ state }: { state: State | null }) {
  const [requests, setRequests] = useState<RequestRecord[]>([]);
  const [path, setPath] = useState("all");
  const [search, setSearch] = useState("");
  const [error, setError] = useState("");
  const latest = state?.requests[0];
  useEffect(() => {
    get<{ requests: RequestRecord[] }>(`../control/requests?limit=${LIMIT}`)
      .then((found) => {
        setRequests(found.requests);
        setError("");
      })
      .catch((problem: Error) => setError(problem.message));
  }, [latest?.request_id, latest?.outcome]);
  const shown = useMemo(
    () =>
      requests.filter(
        (r) => (path === "all" || r.path === path) && r.request_id.includes(search.trim()),
      ),
    [requests, path, search],
  );
  return (
    <section>
      <h2>Requests</h2>
      <form class="filters" onSubmit={(event) => event.preventDefault()}>
        <label>
          path
          <select value={path} onChange={(event) => setPath(event.currentTarget.value)}>
            {PATHS.map((name) => (
              <option>{name}</option>
            ))}
          </select>
        </label>
        <label>
          request id
          <input
            type="search"
            value={search}
            onInput={(event) => setSearch(event.currentTarget.value)}
          />
        </label>
        <span class="quiet">
          {shown.length} of the last {requests.length}
        </span>
      </form>
      {error && <p class="lost">{error}</p>}
      <RequestTable requests={shown} />
    </section>
  );
}
