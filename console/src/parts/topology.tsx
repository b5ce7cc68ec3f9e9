// Clusters, their engines and pools, and the links between them.

import { CARRIED_OVER_S, type ClusterState, type EngineState, type LinkSample, type PoolState, type State, type TierUse } from "../api";
import { count, duration, money, percent, rate, size } from "../format";

export function Topology({ state }: { state: State }) {
  const away = state.clusters.filter((cluster) => cluster.role === "prfaas");
  const home = state.clusters.filter((cluster) => cluster.role === "pd");
  const slow = new Set(state.alarms.filter((a) => a.name === "link_slow").map((a) => a.subject));
  return (
    <section class="topology" aria-label="Topology">
      <div class="clusters">
        {away.map((cluster) => (
          <Cluster cluster={cluster} />
        ))}
        {!away.length && <p class="empty">No PrfaaS cluster: everything is local.</p>}
      </div>
      <div class="links">
        {Object.entries(state.sample.links).map(([name, link]) => (
          <Link name={name} link={link} isSlow={slow.has(name)} />
        ))}
      </div>
      <div class="clusters">
        {home.map((cluster) => (
          <Cluster cluster={cluster} />
        ))}
      </div>
    </section>
  );
}

function Cluster({ cluster }: { cluster: ClusterState }) {
  return (
    <article class={`cluster ${cluster.role}`}>
      <h3>
        {cluster.name}
        <small>
          {cluster.role === "prfaas" ? "prefill only" : "prefill and decode"}
          {cluster.is_on ? "" : ", off"}
        </small>
      </h3>
      <ul class="engines">
        {cluster.engines.map((engine) => (
          <Engine engine={engine} />
        ))}
      </ul>
      {cluster.pools.map((pool) => (
        <Pool pool={pool} />
      ))}
    </article>
  );
}

function Engine({ engine }: { engine: EngineState }) {
  const trouble = troubleOf(engine);
  const what = [
    trouble || `${engine.num_in_flight} in flight from this gateway`,
    `${count(engine.num_running)} running, ${count(engine.num_waiting)} waiting`,
    `KV cache ${percent(engine.kv_use)} full`,
  ].join("; ");
  return (
    <li class={trouble ? "engine down" : "engine"} title={`${engine.name}: ${what}`}>
      <span class="name">
        {engine.name}
        {engine.role !== "both" && <small> {engine.role}</small>}
      </span>
      <span class="bar" title={`KV cache ${percent(engine.kv_use)} full`}>
        <i style={{ width: `${(engine.kv_use ?? 0) * 100}%` }} />
      </span>
      <span class="figure">{trouble || load(engine)}</span>
    </li>
  );
}

/** Running, and how many wait behind them. */
function load(engine: EngineState): string {
  const running = engine.num_running ?? engine.num_in_flight;
  return engine.num_waiting ? `${running} + ${engine.num_waiting}` : `${running}`;
}

function troubleOf(engine: EngineState): string {
  if (!engine.is_ready) return "down";
  if (engine.is_drained) return "drained";
  return engine.breaker === "closed" ? "" : "spared";
}

function Pool({ pool }: { pool: PoolState }) {
  return (
    <section class={pool.is_live ? "pool" : "pool down"} aria-label={pool.name}>
      <span class="name">{pool.name}</span>
      <span class="figure">{pool.is_live ? holds(pool) : "not heard"}</span>
      {pool.tiers.map((tier) => (
        <Tier tier={tier} leased={tier.name === "host" ? pool.leased_bytes : 0} />
      ))}
    </section>
  );
}

function holds(pool: PoolState): string {
  const parts = [`${count(pool.num_blocks)} blocks`];
  if (pool.num_leased) parts.push(`${count(pool.num_leased)} leased`);
  if (pool.index_state !== "exact") parts.push(pool.index_state);
  return parts.join(", ");
}

/** Bytes of a tier by class: prefixes that may be hit, and what came with transfers and waits. */
function Tier({ tier, leased }: { tier: TierUse; leased: number }) {
  const share = (bytes: number) => (tier.capacity_bytes ? bytes / tier.capacity_bytes : 0);
  const name = tier.name === "host" ? "memory" : tier.name;
  const prefixes = Math.max(tier.used_bytes - leased, 0);
  const full = `${percent(share(tier.used_bytes))} full`;
  return (
    <>
      <p class="tier" title={`${count(tier.num_blocks)} blocks in ${name}, ${full}`}>
        <span>{name}</span>
        <span class="bar">
          <i style={{ width: `${share(prefixes) * 100}%` }} />
          <i class="leased" style={{ width: `${share(leased) * 100}%` }} />
        </span>
        <span class="figure">
          {size(tier.used_bytes)} of {size(tier.capacity_bytes)}
        </span>
      </p>
      {tier.name === "host" && (
        <p class="classes">
          <span>
            <i /> prefix cache {size(prefixes)}
          </span>
          <span title="blocks of transfers that nobody has loaded yet">
            <i class="leased" /> transfers {size(leased)}
          </span>
        </p>
      )}
    </>
  );
}

function Link({ name, link, isSlow }: { name: string; link: LinkSample; isSlow: boolean }) {
  const [source, destination] = name.split(">");
  const isBusy = link.carried_bits_per_s > 0 || link.queued_bytes + link.in_flight_bytes > 0;
  const kind = !link.up ? "down" : isSlow ? "slow" : isBusy ? "busy" : "idle";
  return (
    <article class={`link ${kind}`} title={`${source} to ${destination}`}>
      <div class="wire" aria-hidden="true">
        <i />
      </div>
      <strong>{!link.up ? "link down" : isBusy ? rate(link.carried_bits_per_s) : "idle"}</strong>
      <dl>
        <dt title={`bytes delivered, mean of ${CARRIED_OVER_S} s, by what the operator allows`}>of the budget</dt>
        <dd>{link.budget_bits_per_s ? percent(link.carried_bits_per_s / link.budget_bits_per_s) : "no budget"}</dd>
        <dt>round trip</dt>
        <dd>{link.rtt_ms ? duration(link.rtt_ms) : "–"}</dd>
        <dt>waiting</dt>
        <dd>{size(link.queued_bytes)}</dd>
        <dt>moved</dt>
        <dd>{size(link.kv_bytes)}</dd>
        <dt>cost so far</dt>
        <dd class="cost" title="in the currency of the plan, since this gateway started">
          {link.cost == null ? "no price set" : money(link.cost)}
        </dd>
        {link.offload_threshold != null && (
          <>
            <dt>threshold</dt>
            <dd>{count(link.offload_threshold)} tokens</dd>
          </>
        )}
      </dl>
      <small>
        {source} → {destination}
      </small>
    </article>
  );
}
