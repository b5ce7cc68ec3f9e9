// The planner with sliders. Every figure comes from the gateway's planner, which is prfaas plan.

import { useEffect, useRef, useState } from "preact/hooks";
import { post, type Design, type WhatIf } from "../api";
import { count, duration, percent, rate, short } from "../format";
import { ask } from "../parts/confirm";
import { Slider } from "../parts/slider";
import { Throughput, ThroughputByThreshold } from "../parts/throughput";

type Settings = Record<string, number>;

interface Control {
  name: string;
  label: string;
  range: (base: number) => [number, number];
  log?: boolean;
  step?: number;
  format: (value: number) => string;
}

const CONTROLS: Control[] = [
  {
    name: "prfaas.0.link.bandwidth",
    label: "link bandwidth",
    range: () => [1e8, 1e12],
    log: true,
    format: rate,
  },
  {
    name: "prfaas.0.link.rtt",
    label: "round trip",
    range: () => [0, 0.2],
    step: 0.001,
    format: (s) => duration(s * 1000),
  },
  {
    name: "prfaas.0.link.price_per_tb",
    label: "price of 1 TB",
    range: () => [0, 50],
    step: 0.1,
    format: short,
  },
  {
    name: "prfaas.0.instances",
    label: "PrfaaS instances",
    range: (base) => [1, Math.max(16, 4 * base)],
    step: 1,
    format: count,
  },
  {
    name: "pd.instances",
    label: "PD instances",
    range: (base) => [2, Math.max(16, 4 * base)],
    step: 1,
    format: count,
  },
  {
    name: "workload.mu",
    label: "median prompt",
    range: (base) => [base - 2, Math.min(base + 2, 11.5)],
    step: 0.02,
    format: (mu) => `${count(Math.exp(mu))} tokens`,
  },
  {
    name: "workload.sigma",
    label: "spread of lengths",
    range: () => [0.2, 2],
    step: 0.02,
    format: short,
  },
  {
    name: "workload.output_tokens",
    label: "answer",
    range: () => [16, 8192],
    log: true,
    format: (n) => `${count(n)} tokens`,
  },
  {
    name: "workload.prefix_hit_ratio",
    label: "cached share of a prompt",
    range: () => [0, 0.95],
    step: 0.01,
    format: percent,
  },
];

const STAGES = {
  prfaas: "PrfaaS prefill and link",
  pd_prefill: "PD prefill",
  decode: "PD decode",
  rate: "Λ, what the system carries",
};

export function WhatIfPage() {
  const [settings, setSettings] = useState<Settings>({});
  const [answer, setAnswer] = useState<WhatIf | null>(null);
  const [base, setBase] = useState<WhatIf | null>(null);
  const [error, setError] = useState("");
  const asking = useRef<AbortController>(null);
  useEffect(() => {
    asking.current?.abort();
    const mine = (asking.current = new AbortController());
    const timer = setTimeout(() => {
      post<WhatIf>("api/what-if", { settings }, mine.signal)
        .then((found) => {
          setAnswer(found);
          setBase((first) => first ?? found);
          setError("");
        })
        .catch((problem: Error) => {
          if (problem.name !== "AbortError") setError(problem.message);
        });
    }, 60);
    return () => clearTimeout(timer);
  }, [settings]);
  if (!answer || !base) return <p class="empty">{error || "Asking the planner…"}</p>;
  const value = (name: string) => settings[name] ?? base.settings[name];
  const change = (name: string, to: number) => setSettings((old) => ({ ...old, [name]: to }));
  const design = answer.plan.exact.designs[0]!;
  const kept = settings["search.threshold"];
  return (
    <section class="what-if">
      <h2>What if</h2>
      <p class="quiet">
        {base.is_own
          ? `${base.plan.title}, the plan of this deployment. `
          : "This deployment names no plan: the figures are of the paper's case study, not of your hardware. "}
        Drag; the planner answers for every setting anew.
      </p>
      {error && <p class="lost">{error}</p>}
      <div class="sides">
        <form class="sliders" onSubmit={(event) => event.preventDefault()}>
          {CONTROLS.map((control) => {
            const now = value(control.name);
            if (now == null) return null;
            const [low, high] = control.range(base.settings[control.name] ?? now);
            return (
              <Slider
                key={control.name}
                label={control.label}
                value={Math.min(Math.max(now, low), high)}
                low={low}
                high={high}
                {...(control.log ? { log: true } : {})}
                {...(control.step ? { step: control.step } : {})}
                format={control.format}
                onChange={(to) => change(control.name, to)}
              />
            );
          })}
          <Slider
            label={kept ? "threshold, kept" : "threshold, best"}
            value={kept ?? design.offload_threshold ?? 0}
            low={0}
            high={answer.threshold.x.at(-1) ?? 131072}
            step={100}
            format={(t) => `${count(t)} tokens`}
            onChange={(to) => change("search.threshold", Math.max(100, to))}
          />
          <button type="button" onClick={() => setSettings({})}>
            Back to the plan
          </button>
        </form>
        <div>
          <Verdict answer={answer} />
          <Designs answer={answer} />
          {base.is_own && <Adopt threshold={design.offload_threshold} />}
          <div class="charts">
            <ThroughputByThreshold
              plan={answer}
              title={`Λ against the threshold, at N_p : N_d = ${design.num_prefill} : ${design.num_decode}`}
              names={STAGES}
            />
            <Throughput
              plan={answer}
              curve={answer.split}
              title="Λ against the split N_p : N_d of the PD cluster"
              names={STAGES}
              xFormat={(n) => `${Math.round(n)} : ${Math.round(answer.num_pd - n)}`}
              xLabel="N_p : N_d"
              mark={design.num_prefill}
            />
          </div>
        </div>
      </div>
    </section>
  );
}

function Verdict({ answer }: { answer: WhatIf }) {
  const gain = answer.plan.exact.gain_at_equal_cost;
  return (
    <p class={`verdict ${gain > 0 ? "good" : "bad"}`}>
      <strong>
        {gain > 0 ? "+" : ""}
        {(gain * 100).toFixed(1)} % at equal cost
      </strong>
      <span>{answer.plan.verdict.sentence}</span>
    </p>
  );
}

function Designs({ answer }: { answer: WhatIf }) {
  const times = answer.plan.latency.overlapped;
  return (
    <div class="scroll" tabIndex={0}>
      <table>
        <thead>
          <tr>
            <th>design</th>
            <th class="number">req/s</th>
            <th class="number wide">offloaded</th>
            <th class="number wide">egress</th>
            <th class="number">TTFT mean</th>
            <th class="number wraps">price, 1M tokens</th>
          </tr>
        </thead>
        <tbody>
          {answer.plan.exact.designs.map((design: Design) => (
            <tr>
              <td class="wraps">{design.name}</td>
              <td class="number">{design.rate_per_s.toFixed(3)}</td>
              <td class="number wide">{percent(design.offload_fraction)}</td>
              <td class="number wide">{rate(design.egress_bits_per_s)}</td>
              <td class="number">{duration((times[design.name]?.mean ?? NaN) * 1000)}</td>
              <td class="number">{design.price_per_mtoken?.toFixed(3) ?? "–"}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Adopt({ threshold }: { threshold: number | null }) {
  const [said, setSaid] = useState("");
  if (!threshold) return null;
  const tokens = Math.round(threshold);
  const adopt = () =>
    ask({
      action: `Offload above ${count(tokens)} tokens`,
      text: "This sets the threshold of all links until the gateway restarts.",
      run: () =>
        post("../control/threshold", { tokens }).then(() =>
          setSaid(`The gateway offloads above ${count(tokens)} new tokens.`),
        ),
    });
  return (
    <p class="adopt">
      <button type="button" onClick={adopt}>
        Adopt this threshold: {count(tokens)} tokens
      </button>
      {said && <span role="status">{said}</span>}
    </p>
  );
}
