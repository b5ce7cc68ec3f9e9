"""A route that a request could take, and all that were considered for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prfaas.core.dispatch.links import Link
from prfaas.core.dispatch.scoring import Candidate, Weights
from prfaas.core.dispatch.types import RemoteCluster, Routed
from prfaas.core.routing.decision import Decision, Path, RoutingFacts
from prfaas.core.routing.predictions import PathSignals, Prediction
from prfaas.records import Record


class RouteOption(Record, frozen=True):
    """A route through one PrfaaS cluster, or past it in the PD cluster.

    Attributes:
        local: Instance of the PD cluster that would prefill, or that would decode as well; None
            when none can.
        remote: Instance of the PrfaaS cluster that would prefill; None when none can.
        link: From its pool to the PD cluster's.
        facts: Inputs of a policy.
        signals: What the prediction was made from.
        candidates: In the PrfaaS cluster, the first ones that were scored.
        prefill_pools: Pools of `home` and of `away`.
        held_tokens: Cached prefix in each of these, tokens.
        pull_link: From the pool of the PrfaaS cluster with the longest prefix to that of `home`.
    """

    cluster: RemoteCluster
    local: Candidate | None
    remote: Candidate | None
    link: Link
    facts: RoutingFacts
    prediction: Prediction
    signals: PathSignals
    candidates: Sequence[Candidate]
    prefill_pools: tuple[str, str]
    held_tokens: tuple[int, int]
    pull_link: Link

    def routed(self, decision: Decision, local: str, *, is_mixed: bool) -> Routed:
        """The route of a request that takes this option.

        Args:
            decision: The path; it can be taken.
            local: Name of the PD cluster.
            is_mixed: Its instances prefill and decode.
        """
        facts, link, costs, work = self.facts, self.link, self.cluster.costs, self.prediction.work
        is_remote = decision.path is Path.REMOTE
        prefill = self.remote if is_remote else self.local
        assert prefill is not None  # noqa: S101 (refused or barred before)
        pull = decision.pull_tokens if costs and not is_remote else 0
        hit, shipped_bytes = prefill.hit_tokens + pull, 0
        pulled_from = self.pull_link.source if pull else prefill.pulled_from
        if is_remote and work is not None:
            shipped_bytes = work.shipped_bytes
        elif costs and pull:
            shipped_bytes = costs.shipped_bytes(hit, self.held_tokens[0])
        return Routed(
            decision,
            facts,
            self.cluster.name if is_remote else local,
            prefill.name,
            self.local.name if self.local and is_mixed else None,
            link.source if is_remote else pulled_from,
            link.destination,
            hit,
            shipped_bytes,
            self.prefill_pools[is_remote],
            self.held_tokens[is_remote],
            pulled_from,
        )

    @property
    def rank(self) -> tuple[bool, bool, int]:
        """Open routes first, then the one of least time and bytes."""
        found = self.prediction
        time_ns = found.bytes_ns + (found.remote_ns or 0)
        return self.facts.obstacle is not None, found.remote_ns is None, time_ns

    def misses(self, target_ns: int, path: Path) -> bool:
        """Return True if no path meets the target, nor `path` without transfer and decode."""
        found = self.prediction
        local_ns, remote_ns, alone_ns = found.local_ns, found.remote_ns, found.computed_ns
        if local_ns is None or local_ns <= target_ns:
            return False
        if self.facts.obstacle is None and (remote_ns is None or remote_ns <= target_ns):
            return False
        if path is Path.LOCAL:
            alone_ns = local_ns - found.local_decode_ns
        return alone_ns is not None and alone_ns > target_ns


class Considered(Record, frozen=True):
    """All routes that were considered for a request.

    Attributes:
        num_tokens: Length of the prompt for the scorers, tokens.
        options: Through each PrfaaS cluster; at least one.
        at_home: Candidates in the PD cluster, the first ones that were scored.
    """

    num_tokens: int
    options: Sequence[RouteOption]
    at_local: Sequence[Candidate]
    local_weights: Weights

    def missed(self, routed: Routed) -> Iterator[RouteOption]:
        """Options whose PrfaaS pool would have spared the local prefill of a request.

        What is prefilled remotely comes to the PD cluster by itself, and so does what is pulled.
        """
        if routed.decision.path is Path.LOCAL and not routed.pulls:
            for option in self.options:
                held = option.facts.pullable_tokens > routed.present_tokens
                if held and option.cluster.costs and option.link.destination == routed.destination:
                    yield option

    @property
    def best(self) -> RouteOption:
        """The selected one; `obstacle` has the reason if its remote path is barred."""
        options = self.options
        return options[0] if len(options) == 1 else min(options, key=lambda option: option.rank)
