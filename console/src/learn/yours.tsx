// Your numbers: the planner's answers to a grid of questions, and a live one where a gateway is there.

import { useEffect, useState } from "preact/hooks";
import { post, type WhatIf } from "../api";
import type { Data } from "./data";
import { tokens } from "./time";

const FIT = ["pays", "does not pay", "is too close to call"];

export function Yours({ data, isServed }: { data: Data["yours"]; isServed: boolean }) {
  const [model, setModel] = useState(0);
  const [fleet, setFleet] = useState(0);
  const [line, setLine] = useState(3);
  const [length, setLength] = useState(4);
  const place = ((model * data.fleets.length + fleet) * data.bits_per_s.length + line) * data.medians.length + length;
  const [fit, gain, threshold, share, ours, other] = data.answers.slice(place * 6, place * 6 + 6) as [
    number, number, number, number, number, number,
  ];
  const at = (l: number, m: number) =>
    data.answers.slice((((model * data.fleets.length + fleet) * data.bits_per_s.length + l) * data.medians.length + m) * 6)[0]!;
  const gainAt = (l: number, m: number) =>
    data.answers[(((model * data.fleets.length + fleet) * data.bits_per_s.length + l) * data.medians.length + m) * 6 + 1]!;
  const most = Math.max(ours, other);
  const text = plan(data, model, fleet, line, length);
  return (
    <>
      <div class="yours">
        <div class="form">
          <label>
            Model
            <select value={model} onChange={(event) => setModel(Number(event.currentTarget.value))}>
              {data.models.map((name, i) => (
                <option value={i}>{i === 0 ? "the paper's hybrid model, 1T parameters" : name}</option>
              ))}
            </select>
          </label>
          <label>
            Machines
            <select value={fleet} onChange={(event) => setFleet(Number(event.currentTarget.value))}>
              {data.fleets.map(([count, same], i) => (
                <option value={i}>
                  64 {same ? "H200" : "H20"} here, {count * 8} H200 there
                </option>
              ))}
            </select>
          </label>
          <label>
            <span>
              Line <b class="out">{gbit(data.bits_per_s[line]!)}</b>
            </span>
            <input type="range" min={0} max={data.bits_per_s.length - 1} value={line} aria-valuetext={gbit(data.bits_per_s[line]!)} onInput={(event) => setLine(Number(event.currentTarget.value))} />
          </label>
          <label>
            <span>
              Typical prompt <b class="out">{tokens(data.medians[length]!)} tokens</b>
            </span>
            <input type="range" min={0} max={data.medians.length - 1} value={length} aria-valuetext={`${data.medians[length]} tokens`} onInput={(event) => setLength(Number(event.currentTarget.value))} />
          </label>
        </div>
        <div>
          <p class={`verdict fit-${fit}`} aria-live="polite">
            <b>A remote site {FIT[fit]}:</b> {signed(gain)} requests for the same money.
          </p>
          <div class="bars">
            <Bar name="with a remote site" value={ours} most={most} tone="remote" />
            <Bar name="same money, one site" value={other} most={most} tone="plain" />
          </div>
          <p class="reading">
            {share > 0 && share < 100 ? (
              <>
                Prompts with more than <b>{tokens(threshold)} new tokens</b> go: {share} of 100.
              </>
            ) : share >= 100 ? (
              "Every prompt goes: the local machines are all needed to write."
            ) : (
              "No prompt goes: the line would cost more than it saves."
            )}
          </p>
        </div>
      </div>
      <div class="map-place">
        <table class="map">
          <caption>
            Where it pays, for this model and these machines: requests gained for the same money, in %
          </caption>
          <thead>
            <tr>
              <th scope="col">typical prompt</th>
              {data.bits_per_s.map((bits) => (
                <th scope="col">{bits / 1e9}G</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {data.medians.map((median, m) => (
              <tr>
                <th scope="row">{median / 1000}K tokens</th>
                {data.bits_per_s.map((_, l) => (
                  <td
                    class={`fit-${at(l, m)} ${l === line && m === length ? "yours-now" : ""}`}
                    onClick={() => (setLine(l), setLength(m))}
                  >
                    {signed(gainAt(l, m)).replace(" %", "")}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
        <p class="key">
          <i class="fit-0" /> pays <i class="fit-2" /> within the planner's error, or bought with longer waits{" "}
          <i class="fit-1" /> does not pay
        </p>
      </div>
      <Copy text={text} />
      {isServed && <Own />}
    </>
  );
}

const gbit = (bits: number) => `${bits / 1e9} Gbit/s`;
const signed = (n: number) => `${n > 0 ? "+" : n < 0 ? "−" : "±"}${Math.abs(n)} %`;

function Bar({ name, value, most, tone }: { name: string; value: number; most: number; tone: string }) {
  return (
    <div class={`bar-row ${tone}`}>
      <span>{name}</span>
      <span class="bar">
        <i style={{ width: `${(value / most) * 100}%` }} />
      </span>
      <b>{value} a minute</b>
    </div>
  );
}

/** The plan file of a place: as `plan_text` in benchmarks/explanation.py. */
export function plan(data: Data["yours"], model: number, fleet: number, line: number, length: number): string {
  const [count, isSame] = data.fleets[fleet]!;
  const text = data.templates[model]!
    .replace("{PRFAAS}", String(count))
    .replace("{BANDWIDTH}", `${data.bits_per_s[line]! / 1e9}Gbps`)
    .replace("{MU}", Math.log(data.medians[length]!).toFixed(3));
  if (!isSame) return text;
  const [far, near] = text.split("[pd]\n") as [string, string];
  const prefill = far.split("[prfaas.prefill]\n")[1]!.trim();
  const [head, rest] = near.split("[pd.prefill]\n") as [string, string];
  const price = (part: string) => part.split("price_per_gpu_hour = ")[1]!.split("\n")[0]!;
  const own = head
    .replace("H20 cluster", "local H200 cluster")
    .replace(`= ${price(head)}\n`, `= ${price(far)}\n`);
  return `${far}[pd]\n${own}[pd.prefill]\n${prefill}\n[pd.decode]\n${rest.split("[pd.decode]\n")[1]!}`;
}

function Copy({ text }: { text: string }) {
  const [said, setSaid] = useState("");
  const copy = () =>
    navigator.clipboard
      .writeText(text)
      .then(() => setSaid("Copied. Save it as plan.toml and run: prfaas plan plan.toml"))
      .catch(() => setSaid("The browser does not allow it; open the file below and copy it."));
  return (
    <div class="copy">
      <p>
        <button type="button" class="strong" onClick={copy}>
          Copy the plan file
        </button>{" "}
        <span role="status">{said}</span>
      </p>
      <details>
        <summary>The plan file of this point; its prices and times are assumptions to replace</summary>
        <pre tabIndex={0}>{text}</pre>
      </details>
    </div>
  );
}

/** The gateway's own planner, asked live. */
function Own() {
  const [found, setFound] = useState<WhatIf | null>(null);
  const [gbits, setGbits] = useState<number | null>(null);
  const [error, setError] = useState("");
  useEffect(() => {
    const settings = gbits == null ? {} : { "prfaas.0.link.bandwidth": gbits * 1e9 };
    const stopped = new AbortController();
    const soon = setTimeout(() => {
      post<WhatIf>("api/what-if", { settings }, stopped.signal)
        .then((answer) => (setFound(answer), setError("")))
        .catch((problem: Error) => stopped.signal.aborted || setError(problem.message));
    }, 150);
    return () => (clearTimeout(soon), stopped.abort());
  }, [gbits]);
  if (!found) return error ? <p class="quiet">The planner of this gateway: {error}</p> : null;
  const now = gbits ?? (found.settings["prfaas.0.link.bandwidth"] ?? 1e10) / 1e9;
  return (
    <div class="own">
      <h3>{found.is_own ? "The plan of this deployment" : "The planner of this gateway, with the paper's case study"}</h3>
      <label class="long-slider">
        <span>
          Line <b class="out">{now.toPrecision(3)} Gbit/s</b>
        </span>
        <input
          type="range"
          min={0}
          max={100}
          value={(Math.log(now / 0.5) / Math.log(800)) * 100}
          aria-valuetext={`${now.toPrecision(3)} Gbit/s`}
          onInput={(event) => setGbits(0.5 * 800 ** (Number(event.currentTarget.value) / 100))}
        />
      </label>
      <p class="reading">
        {found.plan.verdict.sentence} {error}
      </p>
      <p class="quiet">
        More settings: <a href="./#/what-if">What if</a>.
      </p>
    </div>
  );
}
