// Numbers as people read them.

export function rate(bitsPerS: number | null | undefined): string {
  if (bitsPerS == null) return "–";
  let value = bitsPerS;
  for (const unit of ["bit/s", "kbit/s", "Mbit/s"]) {
    if (value < 1000) return `${short(value)} ${unit}`;
    value /= 1000;
  }
  return `${short(value)} Gbit/s`;
}

export function size(bytes: number | null | undefined): string {
  if (bytes == null) return "–";
  let value = bytes;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return `${short(value)} ${unit}`;
    value /= 1024;
  }
  return `${short(value)} TiB`;
}

/** Distances of marks on an axis of bytes. */
export const SIZE_STEPS = Array.from({ length: 50 }, (_, power) => 2 ** power);

/** Distances of marks on an axis of milliseconds. */
export const DURATION_STEPS = [
  ...[0.01, 0.1, 1, 10, 100, 1000].flatMap((unit) => [unit, 2 * unit, 5 * unit]),
  ...[1 / 6, 0.5, 1, 2, 5, 10, 20, 60, 120, 360].map((minutes) => minutes * 60_000),
];

export function duration(ms: number | null | undefined): string {
  if (ms == null) return "–";
  if (ms === 0) return "0 s";
  if (ms < 1) return `${Math.round(ms * 1000)} µs`;
  if (ms < 1000) return `${short(ms)} ms`;
  return ms < 60_000 ? `${short(ms / 1000)} s` : `${short(ms / 60_000)} min`;
}

export function count(value: number | null | undefined): string {
  return value == null ? "–" : Math.round(value).toLocaleString("en");
}

/** A count on an axis, which also has marks between whole numbers: those say nothing. */
export function whole(value: number): string {
  return Number.isInteger(value) ? count(value) : "";
}

/** An amount in the currency of the plan, whichever that is. */
export function money(value: number): string {
  if (value === 0) return "0";
  if (value < 0.0001) return "< 0.0001";
  if (value < 1) return `${Number(value.toPrecision(2))}`;
  return value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
}

export function percent(share: number | null | undefined): string {
  return share == null ? "–" : `${(share * 100).toFixed(Math.abs(share) < 0.1 ? 1 : 0)} %`;
}

export function short(value: number): string {
  if (value === 0) return "0";
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return value.toFixed(digits);
}

export function clock(unixS: number): string {
  return new Date(unixS * 1000).toLocaleTimeString("en-GB");
}
