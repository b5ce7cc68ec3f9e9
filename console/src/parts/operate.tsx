// What an operator can do to the parts: take them out of use, and hold the loops.

import { useState } from "preact/hooks";
import { post, type ClusterState, type EngineState, type State } from "../api";
import { ask } from "./confirm";

interface Row {
  kind: string;
  name: string;
  state: string;
  actions: { label: string; action: string; text: string; run: () => Promise<unknown> }[];
}

export function Operate({ state }: { state: State }) {
  const [isOpen, setOpen] = useState(false);
  const rows = [loops(state), ...state.clusters.flatMap(ofCluster), ...thresholds(state)];
  return (
    <details class="operate" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>Drain, switch off, freeze</summary>
      <div class="scroll" tabIndex={0}>
        <table>
          <thead>
            <tr>
              <th>part</th>
              <th>state</th>
              <th>change</th>
            </tr>
          </thead>
          <tbody>
            {(isOpen ? rows : []).map((row) => (
              <tr key={`${row.kind} ${row.name}`}>
                <td>
                  <small>{row.kind}</small> {row.name}
                </td>
                <td>{row.state}</td>
                <td>
                  {row.actions.map((each) => (
                    <button type="button" onClick={() => ask(each)} aria-label={each.action}>
                      {each.label}
                    </button>
                  ))}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <p class="quiet">
        Changes last until the gateway restarts. The same from a terminal: <code>prfaas ctl</code>.
      </p>
    </details>
  );
}

function loops(state: State): Row {
  const { frozen } = state.loops;
  const label = frozen ? "Unfreeze" : "Freeze";
  return {
    kind: "control",
    name: "loops",
    state: frozen ? "frozen" : "running",
    actions: [
      {
        label,
        action: `${label} the loops`,
        text: frozen
          ? "Thresholds, roles and copies change again by themselves, from where they stand."
          : "Thresholds, roles and copies stay as they are until you unfreeze them. Requests are served as before.",
        run: () => post("../control/loops", { frozen: !frozen }),
      },
    ],
  };
}

function ofCluster(cluster: ClusterState): Row[] {
  const { is_on: isOn } = cluster;
  const label = isOn ? "Switch off" : "Switch on";
  const whole: Row = {
    kind: "cluster",
    name: cluster.name,
    state: isOn ? "on" : "off",
    actions: [
      {
        label,
        action: `${label} cluster ${cluster.name}`,
        text: isOn
          ? `None of its ${cluster.engines.length} engines gets anything new; what runs there ends.`
          : "Its engines take requests again, but for those that are drained.",
        run: () => post(`../control/clusters/${encodeURIComponent(cluster.name)}`, { on: !isOn }),
      },
    ],
  };
  return [whole, ...cluster.pools.map((pool) => ofPool(pool.name, cluster)), ...cluster.engines.map(ofEngine)];
}

function drain(engine: EngineState, drained: boolean): Promise<unknown> {
  return post(`../control/engines/${encodeURIComponent(engine.name)}`, { drained });
}

function ofEngine(engine: EngineState): Row {
  const label = engine.is_drained ? "Resume" : "Drain";
  return {
    kind: "engine",
    name: engine.name,
    state: engine.is_drained ? `drained, ${engine.num_in_flight} left` : engine.is_ready ? "in use" : "down",
    actions: [
      {
        label,
        action: `${label} ${engine.name}`,
        text: engine.is_drained
          ? "It takes requests again."
          : `It gets nothing new; its ${engine.num_in_flight} requests in flight end there.`,
        run: () => drain(engine, !engine.is_drained),
      },
    ],
  };
}

/** A pool node is out of use once none of its engines gets anything. */
function ofPool(name: string, cluster: ClusterState): Row {
  const engines = cluster.engines.filter((engine) => engine.pool === name);
  const isDrained = engines.length > 0 && engines.every((engine) => engine.is_drained);
  const label = isDrained ? "Resume" : "Drain";
  const names = engines.map((engine) => engine.name).join(", ");
  return {
    kind: "pool",
    name,
    state: isDrained ? "drained" : "in use",
    actions: engines.length
      ? [
          {
            label,
            action: `${label} pool ${name}`,
            text: isDrained
              ? `Its engines (${names}) take requests again.`
              : `Its engines (${names}) get nothing new, so no blocks are computed into it; what runs ends.`,
            run: () => Promise.all(engines.map((engine) => drain(engine, !isDrained))),
          },
        ]
      : [],
  };
}

function thresholds(state: State): Row[] {
  return Object.entries(state.sample.links)
    .filter(([, link]) => link.offload_threshold != null)
    .map(([name, link]) => {
      const [source, destination] = name.split(">");
      const tokens = link.offload_threshold!;
      return {
        kind: "threshold",
        name: name.replace(">", " → "),
        state: `${tokens.toLocaleString("en")} tokens`,
        actions: [
          {
            label: "Hold",
            action: `Hold the threshold of ${name} at ${tokens.toLocaleString("en")}`,
            text: "No loop moves it until it is given back.",
            run: () => post("../control/threshold", { tokens, source, destination }),
          },
          {
            label: "Give back",
            action: `Give the threshold of ${name} back`,
            text: "It has the value of the deployment file or its plan, and the loops may move it again.",
            run: () => post("../control/threshold", { tokens: null, source, destination }),
          },
        ],
      };
    });
}
