// The idea as a picture: what crosses the link, and why there is a threshold.

import { useEffect, useState } from "preact/hooks";
import { get, post, type CacheSizes, type WhatIf } from "../api";
import { count, duration, rate, size } from "../format";
import { Slider } from "../parts/slider";
import { ThroughputByThreshold } from "../parts/throughput";

const DENSE = "llama_3_3_70b";
const MAX_TOKENS = 131_072;

const STAGES = {
  prfaas: "far cluster and link",
  pd_prefill: "local prefill",
  rate: "what the system carries",
};

export function Learn() {
  const [sizes, setSizes] = useState<CacheSizes | null>(null);
  const [plan, setPlan] = useState<WhatIf | null>(null);
  const [chosen, setChosen] = useState("");
  const [tokens, setTokens] = useState(32_000);
  const [bandwidth, setBandwidth] = useState(10e9);
  const [error, setError] = useState("");
  useEffect(() => {
    get<CacheSizes>("api/models")
      .then((found) => {
        setSizes(found);
        setChosen(found.models.at(-1)!.key);
      })
      .catch((problem: Error) => setError(problem.message));
    post<WhatIf>("api/what-if", { settings: {} })
      .then(setPlan)
      .catch(() => undefined);
  }, []);
  if (!sizes) return <p class="empty">{error || "Fetching the catalogue…"}</p>;
  const dense = sizes.models.find((model) => model.key === DENSE) ?? sizes.models[0]!;
  const hybrid = sizes.models.find((model) => model.key === chosen) ?? sizes.models.at(-1)!;
  return (
    <article class="learn">
      <h2>A long prompt, computed elsewhere</h2>
      <p>
        Reading a prompt (prefill) takes compute; writing the answer (decode) takes memory
        bandwidth. Between them stands the KV cache. What it weighs decides whether the two can live
        in different datacenters.
      </p>
      <form class="sliders" onSubmit={(event) => event.preventDefault()}>
        <Slider
          label="prompt"
          value={tokens}
          low={1000}
          high={MAX_TOKENS}
          log
          format={(t) => `${count(t)} tokens`}
          onChange={setTokens}
        />
        <Slider
          label="link"
          value={bandwidth}
          low={1e9}
          high={400e9}
          log
          format={rate}
          onChange={setBandwidth}
        />
        <label class="choice">
          model
          <select value={hybrid.key} onChange={(event) => setChosen(event.currentTarget.value)}>
            {sizes.models.map((model) => (
              <option value={model.key}>{model.name}</option>
            ))}
          </select>
        </label>
      </form>
      <Crossing name={dense.name} bytes={at(sizes, dense.kv_bytes, tokens)} bandwidth={bandwidth} />
      <Crossing
        name={hybrid.name}
        bytes={at(sizes, hybrid.kv_bytes, tokens)}
        bandwidth={bandwidth}
      />
      <p>
        A hybrid model keeps keys and values in few of its layers; the others hold a state of fixed
        size. Its cache is{" "}
        <strong>
          {(at(sizes, dense.kv_bytes, tokens) / at(sizes, hybrid.kv_bytes, tokens)).toFixed(1)} times
        </strong>{" "}
        smaller here than that of {dense.name}, so ordinary Ethernet can carry it while the next
        chunk of the prompt is computed.
      </p>
      {plan && <Why plan={plan} />}
    </article>
  );
}

/** Bytes at a length, between and beyond the lengths that the gateway gave. */
function at(sizes: CacheSizes, bytes: number[], tokens: number): number {
  const xs = sizes.lengths;
  let i = xs.findIndex((x) => x >= tokens);
  i = i < 0 ? xs.length - 1 : Math.max(i, 1);
  const [x0, x1, y0, y1] = [xs[i - 1]!, xs[i]!, bytes[i - 1]!, bytes[i]!];
  return y0 + ((tokens - x0) / (x1 - x0)) * (y1 - y0);
}

function Crossing({ name, bytes, bandwidth }: { name: string; bytes: number; bandwidth: number }) {
  const seconds = (bytes * 8) / bandwidth;
  const period = Math.min(Math.max(seconds, 0.4), 30);
  const height = Math.min(Math.max(Math.sqrt(bytes / 2 ** 30) * 26, 6), 90);
  return (
    <figure class="crossing">
      <figcaption>
        <strong>{name}</strong> {size(bytes)} of KV cache, {duration(seconds * 1000)} on the link
      </figcaption>
      <div class="path-of-kv">
        <span class="site">prefill</span>
        <span class="lane">
          <i style={{ animationDuration: `${period}s`, height: `${height}px` }} />
        </span>
        <span class="site">decode</span>
      </div>
    </figure>
  );
}

function Why({ plan }: { plan: WhatIf }) {
  const design = plan.plan.exact.designs[0]!;
  return (
    <>
      <h2>Why a threshold</h2>
      <p>
        Send everything away, and the far cluster and the link are the limit; send nothing, and the
        local prefill is. In between lies a length at which both are busy: prompts with
        more than <strong>{count(design.offload_threshold)} new tokens</strong> go, the rest stay,
        and the system carries {design.rate_per_s.toFixed(2)} requests a second.
      </p>
      <ThroughputByThreshold plan={plan} title={plan.plan.title} names={STAGES} />
      <p class="quiet">
        Try other links and lengths under <a href="#/what-if">What if</a>.
      </p>
    </>
  );
}
