// What the page Requests asks for, as it stands in the address, so that a view can be shared.

/** Filters by a value; the names are those of the address and of the gateway. */
export const CHOICES = ["tenant", "path", "reason", "outcome", "engine", "course"] as const;
export type Choice = (typeof CHOICES)[number];

export interface Query extends Partial<Record<Choice | "id", string>> {
  /** Milliseconds at least. */
  ttft_min?: string;
  e2e_min?: string;
  /** The last so many seconds; "all" is everything that is kept. */
  last?: string;
  /** Unix seconds, in place of `last`. */
  since?: string;
  until?: string;
}

const NAMES = [...CHOICES, "id", "ttft_min", "e2e_min", "last", "since", "until"] as const;
export const LAST_DEFAULT = "900";

export function queryOf(hash: string): Query {
  const given = new URLSearchParams(hash.split("?")[1] ?? "");
  const found: Query = {};
  for (const name of NAMES) {
    const value = given.get(name)?.slice(0, 128);
    if (value) found[name] = value;
  }
  return found;
}

export function addressOf(query: Query): string {
  const text = new URLSearchParams();
  for (const name of NAMES) {
    const value = query[name];
    if (value && !(name === "last" && value === LAST_DEFAULT)) text.set(name, value);
  }
  const found = text.toString();
  return found ? `#/requests?${found}` : "#/requests";
}

/** How many filters are set, the time not counted. */
export function numFilters(query: Query): number {
  return NAMES.slice(0, -3).filter((name) => query[name]).length;
}

/** The stretch of time that is asked for now, Unix seconds; none where it is all that is kept. */
export function stretch(query: Query): { since?: number; until?: number } {
  const number = (text?: string) => (text && Number.isFinite(Number(text)) ? Number(text) : undefined);
  const found: { since?: number; until?: number } = {};
  if (query.since || query.until) {
    const [since, until] = [number(query.since), number(query.until)];
    if (since != null) found.since = since;
    if (until != null) found.until = until;
  } else if (query.last !== "all") {
    found.since = Math.floor(Date.now() / 1000 - (number(query.last ?? LAST_DEFAULT) ?? Number(LAST_DEFAULT)));
  }
  return found;
}

/** The query as the gateway takes it. */
export function asked(query: Query, more: Record<string, string | number | undefined>): string {
  const text = new URLSearchParams();
  for (const name of [...CHOICES, "id", "ttft_min", "e2e_min"] as const) {
    if (query[name]) text.set(name, query[name]);
  }
  for (const [name, value] of Object.entries(more)) if (value != null) text.set(name, String(value));
  return text.toString();
}
