"""Changes by the operator while the gateway runs; a restart discards them."""

from __future__ import annotations

import time

from prfaas.config.clusters import ClusterRole
from prfaas.core.control.changes import ChangeEntry, Loop
from prfaas.core.dispatch.links import Link
from prfaas.core.routing.policies import PolicyName
from prfaas.errors import RequestError
from prfaas.gateway.engines.engine import Engine
from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.loops.ticker import ControlTicker
from prfaas.gateway.telemetry.live_parts import LiveParts
from prfaas.gateway.telemetry.prices import PriceBody, change_price, prices_json
from prfaas.membership.views import members_json, sources_json

THRESHOLD_MAX = 100_000_000
_BY_HAND = "as the operator asked"
_GIVEN_BACK = f"{_BY_HAND}; the value of file or plan, and the loops may move it again"
_NOBODY_LEFT = (
    f"{_BY_HAND}; no PD engine takes requests any more: clients get 503 until one is resumed"
)


class Control:
    """The operator's hand on the loops, engines and clusters."""

    def __init__(self, live: LiveParts, control_ticker: ControlTicker) -> None:
        self._live, self._control_ticker = live, control_ticker

    # Changes

    def freeze(self, *, frozen: bool) -> ChangeEntry:
        """Stop the loops where they are, or let them go on."""
        old, self._control_ticker.frozen = self._control_ticker.frozen, frozen
        words = {True: "frozen", False: "running"}
        return self._note("freeze" if frozen else "unfreeze", "loops", words[old], words[frozen])

    def set_threshold(self, tokens: int | None, link: tuple[str, str] | None) -> list[ChangeEntry]:
        """Set the threshold of a link, or of all; no loop moves it until `tokens` is None.

        Raises:
            RequestError: There is no such link, or it connects two hosts of one cluster.
        """
        one = None if link is None else self._link(*link)
        if one is not None and one.is_in_site:
            raise RequestError(
                f"link {one.source}:{one.destination} connects two hosts of one cluster: it has no "
                "threshold; choose one from a PrfaaS cluster",
                status=409,
            )
        found = [each for each in self.links() if not each.is_in_site] if one is None else [one]
        before = [each.policy.offload_threshold for each in found]
        self._live.driver.dispatcher.links.hold(tokens, one)
        action, why = ("threshold", _BY_HAND) if tokens else ("unset", _GIVEN_BACK)
        return [
            self._note(
                action,
                f"link {each.source}:{each.destination}",
                old,
                each.policy.offload_threshold,
                why,
            )
            for each, old in zip(found, before, strict=True)
        ]

    def drain(self, engine: str, *, drained: bool) -> ChangeEntry:
        """Give an engine nothing new, whatever its health, or take it back; RequestError if there
        is no such engine."""
        if engine not in self._live.engines.by_name:
            raise _unknown("engine", engine, list(self._live.engines.by_name))
        old = self._live.driver.is_drained(engine)
        self._live.driver.set_drained(engine, time.monotonic_ns(), drained=drained)
        words = {True: "drained", False: "in use"}
        action = "drain" if drained else "resume"
        why = _NOBODY_LEFT if drained and not self._is_anybody_left() else _BY_HAND
        return self._note(action, f"engine {engine}", words[old], words[drained], why)

    def turn(self, cluster: str, *, on: bool) -> ChangeEntry:
        """Give no engine of a cluster anything new, or take it back; RequestError if there is no
        such cluster, or nobody would be left to decode."""
        clusters = self._live.deployment.clusters
        if cluster not in clusters:
            raise _unknown("cluster", cluster, list(clusters))
        left = [
            name
            for name, table in clusters.items()
            if table.role is ClusterRole.PD
            and name != cluster
            and self._live.driver.states.is_on(name)
        ]
        if not on and clusters[cluster].role is ClusterRole.PD and not left:
            raise RequestError(
                f"cluster {cluster} is the only PD cluster that is on: without it nothing could "
                "decode; to keep requests out, stop the gateway",
                status=409,
            )
        old = self._live.driver.states.is_on(cluster)
        self._live.driver.set_cluster(cluster, time.monotonic_ns(), on=on)
        words = {True: "on", False: "off"}
        why = _BY_HAND if on or self._is_anybody_left() else _NOBODY_LEFT
        return self._note(words[on], f"cluster {cluster}", words[old], words[on], why)

    def price(self, cluster: str, body: PriceBody) -> ChangeEntry:
        """Set prices of a cluster, or announce that its capacity leaves; RequestError if there are
        no prices, or no such cluster."""
        old, new = change_price(self._live.driver.dispatcher.market, cluster, body)
        return self._note("price", f"cluster {cluster}", old, new)

    # What there is

    def status(self) -> JsonObject:
        """Loops, predictions, links, clusters, engines and pools."""
        routing = self._live.deployment.routing
        return {
            "policy": routing.effective_policy.value,
            "loops": {
                "frozen": self._control_ticker.frozen,
                "threshold": routing.effective_policy is PolicyName.ADAPTIVE,
                "roles": routing.reroling,
                "replication": routing.replication is not None,
                "admission": routing.ttft_max is not None,
            },
            "predictions": self.predictions(),
            "plan_bytes": self.plan_bytes(),
            "prices": prices_json(self._live.driver.dispatcher.market, time.monotonic_ns()),
            "links": [self._link_state(link) for link in self.links()],
            "clusters": [
                {
                    "name": name,
                    "role": table.role.value,
                    "is_on": self._live.driver.states.is_on(name),
                }
                for name, table in self._live.deployment.clusters.items()
            ],
            "engines": self._engine_states(),
            "layout_mismatches": [each.as_json() for each in self._live.layouts.mismatches()],
            "pools": [
                {"name": pool, "is_live": self._live.pools.is_live(pool)}
                for pool in self._live.pools.names()
            ],
            "members": members_json(self._live.members),
            "member_sources": sources_json(self._live.members),
        }

    def predictions(self) -> list[JsonObject]:
        """Corrections of predictions, by path; none without a plan."""
        if self._live.deployment.routing.plan is None:
            return []
        now_ns = time.monotonic_ns()
        return [
            {
                "path": path.value,
                "cluster": cluster,
                "correction": round(found.factor, 3),
                "error": round(found.error_ratio, 3),
                "num_samples": found.num_samples,
                "is_proven": found.is_proven(now_ns),
                "is_refuted": found.is_refuted,
            }
            for (path, cluster), found in self._live.driver.dispatcher.calibrations.items()
        ]

    def plan_bytes(self) -> JsonObject | None:
        """Correction of the plan's bytes; None without a plan."""
        if self._live.deployment.routing.plan is None:
            return None
        found = self._live.driver.dispatcher.carried
        return {"correction": round(found.factor, 6), "num_transfers": found.num_samples}

    def _engine_states(self) -> list[JsonObject]:
        return [
            self._engine_state(self._live.engines.by_name[name]) | {"cluster": cluster}
            for cluster, table in self._live.deployment.clusters.items()
            for name in table.engines
        ]

    def _engine_state(self, engine: Engine) -> JsonObject:
        return {
            "name": engine.name,
            "role": self._role_of(engine.name),
            "is_ready": engine.is_ready,
            "why_down": engine.why_down,
            "is_drained": self._live.driver.is_drained(engine.name),
            "breaker": self._live.engines.guards.breakers[engine.name].state.value,
            "num_in_flight": engine.num_in_flight,
            "num_waiting": engine.load.num_waiting,
            "num_running": engine.load.num_running,
            "kv_use": engine.load.kv_use,
        }

    def _role_of(self, name: str) -> str | None:
        split = self._live.driver.split
        if split is None or name not in split:
            return None
        return split.role_of(name).value + (", draining" if split.is_changing(name) else "")

    def _link_state(self, link: Link) -> JsonObject:
        measured = self._live.pools.telemetry().get((link.source, link.destination))
        return {
            "source": link.source,
            "destination": link.destination,
            "is_up": link.up,
            "breaker": self._live.engines.guards.breakers[
                link.source, link.destination
            ].state.value,
            "offload_threshold": link.offload_threshold,
            "is_threshold_set": link.is_held and not link.is_in_site,
            "promised_bytes": link.book.promised_bytes,
            "coding_ratio": round(measured.coding_ratio, 3) if measured else 1.0,
            "encryption": measured.encryption if measured else "unknown",
        }

    def links(self) -> list[Link]:
        """Links that exist; the dispatcher also knows one to nowhere when there is no PrfaaS."""
        return [link for link in self._live.driver.dispatcher.links if link.source]

    def _link(self, source: str, destination: str) -> Link:
        links = {f"{link.source}:{link.destination}": link for link in self.links()}
        if (name := f"{source}:{destination}") in links:
            return links[name]
        raise _unknown("link", name, list(links))

    def _is_anybody_left(self) -> bool:
        """Return True if the operator lets any PD engine take requests."""
        return not all(
            map(self._live.driver.states.is_barred, self._live.engines.names(ClusterRole.PD))
        )

    def _note(
        self,
        action: str,
        what: str,
        old: int | str | None,
        new: int | str | None,
        why: str = _BY_HAND,
    ) -> ChangeEntry:
        return self._live.journal.note(Loop.OPERATOR, action, what, old=old, new=new, why=why)


def _unknown(kind: str, name: str, known: list[str]) -> RequestError:
    shown = ", ".join(known) or "none"
    return RequestError(f"there is no {kind} {name[:80]!r}; there are: {shown}", status=404)
