// Requests as a tool: filters that stand in the address, figures over time, and a list that holds still.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { get, type RequestRecord } from "../api";
import { count } from "../format";
import { Filters, type Facets } from "../parts/request_filters";
import { RequestCharts } from "../parts/request_charts";
import { addressOf, asked, queryOf, stretch, type Query } from "../parts/request_query";
import { RequestTable } from "../parts/request_table";

const LOOK_MS = 2000;
const REFRESHED_MAX = 100;

interface Page {
  newest: number;
  num_kept: number;
  num_found: number;
  oldest: number | null;
  requests: RequestRecord[];
  facets: Facets | null;
}

/** What is on the page, kept while one request is looked at. */
interface Listed {
  address: string;
  rows: RequestRecord[];
  /** Number of the newest request of the gateway when the list was made. */
  top: number;
  numFound: number;
  numKept: number;
  oldest: number | null;
  facets: Facets;
  since: number | undefined;
  scroll: number;
}

let kept: Listed | null = null;

/** Where the list stands, for the way back from one request. */
export function listAddress(): string {
  return kept?.address ?? "#/requests";
}

export function Requests({ address }: { address: string }) {
  const query = useMemo(() => queryOf(address), [address]);
  const own = addressOf(query);
  const [listed, setListed] = useState<Listed | null>(kept?.address === own ? kept : null);
  const [error, setError] = useState("");
  const [numNew, setNumNew] = useState(0);
  const current = useRef<Listed | null>(null);
  current.current = kept = listed;
  const isLoading = useRef(false);
  const shown = useRef<RequestRecord[]>([]);

  const begin = () => {
    const time = stretch(query);
    get<Page>(`api/requests?${asked(query, time)}`)
      .then((page) => {
        setNumNew(0);
        setError("");
        setListed({
          address: own,
          rows: page.requests,
          top: page.newest,
          numFound: page.num_found,
          numKept: page.num_kept,
          oldest: page.oldest,
          facets: page.facets ?? {},
          since: time.since,
          scroll: 0,
        });
      })
      .catch((problem: Error) => setError(problem.message));
  };
  useEffect(() => {
    const old = current.current;
    if (old?.address !== own) begin();
    else scrollTo(0, old.scroll);
  }, [own]);
  useEffect(() => {
    const moved = () => {
      if (kept) kept.scroll = scrollY;
    };
    addEventListener("scroll", moved, { passive: true });
    return () => removeEventListener("scroll", moved);
  }, []);

  const more = () => {
    const list = current.current;
    const last = list?.rows.at(-1)?.number;
    if (!list || last == null || isLoading.current || list.rows.length >= list.numFound) return;
    isLoading.current = true;
    const time = { ...stretch(query), since: list.since };
    get<Page>(`api/requests?${asked(query, { ...time, before: last })}`)
      .then((page) => {
        const now = current.current;
        if (now?.address !== list.address || now.rows.at(-1)?.number !== last) return;
        // Requests that began since were never counted, and those that were forgotten are no more.
        const rows = [...now.rows, ...page.requests];
        setListed({ ...now, rows, numFound: page.requests.length ? now.numFound : rows.length });
      })
      .catch((problem: Error) => setError(problem.message))
      .finally(() => (isLoading.current = false));
  };

  useEffect(() => {
    const look = async () => {
      const list = current.current;
      if (!list || document.hidden) return;
      const time = stretch(query);
      const newer = await get<Page>(`api/requests?${asked(query, { ...time, after: list.top, limit: 1 })}`);
      setError("");
      if (newer.newest < list.top || (!list.rows.length && newer.num_found)) return begin();
      setNumNew(newer.num_found);
      const open = shown.current.filter((r) => r.outcome === "running" || r.transfer_state === "open");
      if (!open.length) return;
      const numbers = open.slice(0, REFRESHED_MAX).map((r) => r.number!);
      const page = await get<Page>(`api/requests?numbers=${numbers.join(",")}`);
      const fresh = new Map(page.requests.map((r) => [r.number, r]));
      setListed((now) => now && { ...now, rows: now.rows.map((r) => fresh.get(r.number) ?? r) });
    };
    const timer = setInterval(() => look().catch((problem: Error) => setError(problem.message)), LOOK_MS);
    return () => clearInterval(timer);
  }, [own]);

  const change = (next: Query) => (location.hash = addressOf(next));
  return (
    <section class="requests-page">
      <h1>Requests</h1>
      <Filters query={query} facets={listed?.facets ?? {}} onChange={change} />
      {error && (
        <p class="lost" role="alert">
          {error}
        </p>
      )}
      <RequestCharts query={query} oldest={listed?.oldest ?? null} onChange={change} />
      <div class="above">
        <span class="quiet" role="status">
          {listed && `${count(listed.numFound)} of the last ${count(listed.numKept)} requests`}
        </span>
        {numNew > 0 && (
          <button type="button" class="first" onClick={begin}>
            {count(numNew)} new
          </button>
        )}
      </div>
      {listed && (
        <RequestTable
          requests={listed.rows}
          onEnd={more}
          onShown={(rows) => (shown.current = rows)}
        />
      )}
    </section>
  );
}
