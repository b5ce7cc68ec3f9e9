"""Offers of the market from the routes of a request, and the decision that a choice makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prfaas.core.dispatch.stages import PrefillTimes
from prfaas.core.market.choice import ClusterOffer, Exclusion, OfferChoice
from prfaas.core.routing.decision import Decision, Path, Reason

if TYPE_CHECKING:
    from prfaas.core.dispatch.route_finder import RouteOption


def offers_of(
    options: Sequence[RouteOption], local: str, times: PrefillTimes
) -> list[ClusterOffer]:
    """Offers of all clusters, the PD cluster's first.

    Args:
        options: Through each PrfaaS cluster.
        local: Name of the PD cluster.
        times: Expected times of prefills.
    """
    first = options[0]
    at_local = ClusterOffer(
        local,
        times.local_ns(first.facts.num_new_tokens, first.facts.pd_hit_tokens),
        0,
        first.prediction.local_ns,
        excluded="" if first.local is not None else Reason.NO_PREFILL_INSTANCE,
    )
    return [at_local, *(_remote(option, times) for option in options if option.cluster.name)]


def _remote(option: RouteOption, times: PrefillTimes) -> ClusterOffer:
    facts, found, name = option.facts, option.prediction, option.cluster.name
    ttft_ns, obstacle, there = found.remote_ns, facts.obstacle, facts.prfaas_hit_tokens
    return ClusterOffer(
        name,
        times.remote_ns(name, facts.num_prompt_tokens - there, there),
        0 if found.work is None else found.work.shipped_bytes,
        ttft_ns,
        0 if ttft_ns is None else ttft_ns - found.remote_decode_ns,
        "" if obstacle is None else obstacle.value,
    )


def decided(
    choice: OfferChoice,
    options: Sequence[RouteOption],
    usual: RouteOption,
    local: str,
    threshold: int,
) -> tuple[RouteOption, Decision]:
    """The route of a choice, and its decision.

    Args:
        choice: Between the offers of `options`.
        options: Through each PrfaaS cluster.
        usual: The route that names what bars a remote path where nothing is feasible.
        local: Name of the PD cluster.
        threshold: Tokens, for the decision's record: it decided nothing.
    """
    best = choice.best
    option, path = usual, Path.LOCAL
    if best is not None and best.offer.cluster != local:
        option = next(each for each in options if each.cluster.name == best.offer.cluster)
        path = Path.REMOTE
        reason = Reason.LEAST_LATE if best.excluded else Reason.CHEAPEST_REMOTE
    else:
        reason = _local_reason(choice, usual)
    facts, found = option.facts, option.prediction
    detail = ""
    if best is not None:
        feasible = [each for each in choice.costed if each.excluded == best.excluded]
        detail = ", ".join(f"{each.offer.cluster} {each.total:.4g}" for each in feasible)
    return option, Decision(
        path,
        reason,
        facts.num_new_tokens,
        threshold,
        found.local_ns,
        found.remote_ns,
        unpredicted=found.missing,
        detail=detail,
        choice=choice,
    )


def _local_reason(choice: OfferChoice, usual: RouteOption) -> Reason:
    remote = choice.costed[1:]
    if any(not each.excluded for each in remote):
        return Reason.CHEAPEST_LOCAL
    best = choice.best
    if (
        best is not None
        and best.excluded
        and any(each.excluded == best.excluded for each in remote)
    ):
        return Reason.LEAST_LATE
    if any(each.excluded in _OF_MARKET for each in remote) or usual.facts.obstacle is None:
        return Reason.NONE_FEASIBLE
    return usual.facts.obstacle


_OF_MARKET = frozenset(Exclusion)
