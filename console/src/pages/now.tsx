// What happens at this moment.

import { useEffect, useMemo, useState } from "preact/hooks";
import { CARRIED_OVER_S, get, type Sample, type State } from "../api";
import { Chart, COLOURS, type Line } from "../chart";
import { clock, count, duration, percent, rate, size, whole } from "../format";
import { Operate } from "../parts/operate";
import { RequestTable } from "../parts/request_table";
import { Threshold } from "../parts/threshold";
import { Topology } from "../parts/topology";

const SAMPLES_MAX = 300;

export function Now({ state }: { state: State | null }) {
  const samples = useSamples(state);
  if (!state) return <p class="empty">Waiting for the gateway…</p>;
  return (
    <>
      <Alarms state={state} />
      <Figures state={state} />
      <Topology state={state} />
      <Threshold state={state} />
      <Operate state={state} />
      <Charts samples={samples} />
      <Changes state={state} />
      <section>
        <h2>Requests</h2>
        <RequestTable requests={state.requests.slice(0, 8)} />
      </section>
    </>
  );
}

/** The last minutes: from the gateway at first, then from the stream. */
function useSamples(state: State | null): Sample[] {
  const [samples, setSamples] = useState<Sample[]>([]);
  useEffect(() => {
    get<{ samples: Sample[] }>(`api/history?seconds=${SAMPLES_MAX}`)
      .then((found) => setSamples((seen) => (seen.length > 2 ? seen : found.samples)))
      .catch(() => undefined);
  }, []);
  useEffect(() => {
    if (state) setSamples((seen) => [...seen.slice(1 - SAMPLES_MAX), state.sample]);
  }, [state]);
  return samples;
}

function Alarms({ state }: { state: State }) {
  if (!state.alarms.length)
    return (
      <p class="alarms calm" role="status">
        No alarms
      </p>
    );
  return (
    <div role="alert">
      <ul class="alarms">
      {state.alarms.map((alarm) => (
        <li class={alarm.severity} data-alarm={alarm.name}>
          {alarm.text}
        </li>
      ))}
      </ul>
    </div>
  );
}

function Figures({ state }: { state: State }) {
  const { recent, sample } = state;
  const { local, remote } = recent.paths;
  const finished = local.num_requests + remote.num_requests;
  return (
    <dl class="figures">
      <Figure name="in flight" value={count(sample.num_in_flight)} />
      <Figure name="requests a minute" value={count(recent.num_requests)} />
      <Figure name="offloaded" value={finished ? percent(remote.num_requests / finished) : "–"} />
      <Figure name="median TTFT, local" value={duration(local.ttft_p50_ms)} />
      <Figure name="median TTFT, remote" value={duration(remote.ttft_p50_ms)} />
      <Figure name="KV cache moved" value={size(sample.kv_bytes)} />
      <Figure name="policy" value={state.policy} />
    </dl>
  );
}

function Changes({ state }: { state: State }) {
  if (!state.changes.length) return null;
  return (
    <section>
      <h2>Changes{state.loops.frozen && <small> loops are frozen</small>}</h2>
      <ul class="changes">
        {state.changes.map((change) => (
          <li key={change.number}>
            <time>{clock(change.at_unix_s)}</time>
            <span>
              {change.operator || change.loop}: {change.what} {change.action}
              {change.old != null && `, ${shown(change.old)} → ${shown(change.new)}`}
              <small> {change.why}</small>
            </span>
          </li>
        ))}
      </ul>
    </section>
  );
}

function shown(value: number | string | null): string {
  return typeof value === "number" ? count(value) : String(value);
}

function Figure({ name, value }: { name: string; value: string }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{value}</dd>
    </div>
  );
}

function Charts({ samples }: { samples: Sample[] }) {
  const names = Object.keys(samples.at(-1)?.links ?? {});
  const x = useMemo(() => samples.map((s) => s.at_unix_s), [samples]);
  const goodput = useMemo(
    () => names.map((n) => samples.map((s) => s.links[n]?.carried_bits_per_s ?? null)),
    [samples],
  );
  const flow = useMemo(() => [samples.map((s) => s.num_in_flight)], [samples]);
  const lines: Line[] = names.map((label, index) => ({
    label,
    colour: COLOURS[index % COLOURS.length]!,
  }));
  if (samples.length < 2) return null;
  return (
    <section class="charts">
      {names.length > 0 && (
        <Chart title={`Delivered by the links, mean of ${CARRIED_OVER_S} s`} lines={lines} data={[x, ...goodput]} time least={1e6} place={x.length - 1} yFormat={rate} />
      )}
      <Chart
        title="Requests in flight"
        lines={[{ label: "in flight", colour: COLOURS[2]!, fill: true }]}
        data={[x, ...flow]}
        time
        place={x.length - 1}
        yFormat={whole}
        format={count}
      />
    </section>
  );
}
