"""Choice between a pull of a cached prefix from another cluster and its recomputation.

Seconds of prefill against bytes on a link. A byte has a worth in time: what the operator pays for
it, over what a second of a request's time is worth. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from prfaas.core.routing.decision import RoutingFacts
from prfaas.core.routing.predictions import (
    CostModel,
    DecodeWait,
    LinkState,
    PathSignals,
    Prediction,
    no_wait,
)


@dataclass(frozen=True, slots=True)
class PullChoice:
    """A prefix to fetch before prefill.

    Attributes:
        num_tokens: Tokens beyond what is there already.
        arrival_ns: From now until it is there.
    """

    num_tokens: int
    num_bytes: int
    arrival_ns: int


@dataclass(frozen=True, slots=True)
class PullSettings:
    """Settings of pulls.

    Attributes:
        margin_ratio: Gain, as a share of what recomputing takes in all, below which it is not.
    """

    margin_ratio: float = 0.05
    margin_ns: int = 50_000_000


def choose_pull(
    num_prompt_tokens: int,
    here_tokens: int,
    there_tokens: int,
    *,
    wait_ns: int | None,
    prefill_ns: Callable[[int, int], int],
    num_bytes: int,
    link: LinkState | None,
    ns_per_byte: float = 0.0,
    settings: PullSettings = PullSettings(),
) -> PullChoice | None:
    """Choose between a pull of the prefix from another cluster and its recomputation.

    The pull runs while the request waits: prefill starts when both are over.

    Args:
        here_tokens: Usable cached prefix where it is prefilled.
        there_tokens: Usable cached prefix in the other cluster.
        wait_ns: Predicted wait for an instance; None is unknown.
        prefill_ns: Time of a prefill by new tokens and cached prefix.
        num_bytes: KV bytes of the tokens between both.
        link: From there to here; None is unknown.
        ns_per_byte: Worth of a byte on it, as time.
        settings: How much gain it takes.

    Returns:
        None to recompute: always when a signal is unknown, and never slower than recomputing.
    """
    if there_tokens <= here_tokens or wait_ns is None or link is None:
        return None
    # One round trip asks for the bytes and brings the last one.
    arrival_ns = round(link.drain_ns(num_bytes)) + link.rtt_ns
    recomputed = wait_ns + prefill_ns(num_prompt_tokens - here_tokens, here_tokens)
    resumed_ns = prefill_ns(num_prompt_tokens - there_tokens, there_tokens)
    pulled = max(wait_ns, arrival_ns) + resumed_ns
    margin = max(settings.margin_ns, settings.margin_ratio * recomputed)
    if pulled + num_bytes * ns_per_byte + margin >= recomputed:
        return None
    return PullChoice(there_tokens - here_tokens, num_bytes, arrival_ns)


def gain_ns_max(whole_ns: int, rest_ns: int, settings: PullSettings) -> int:
    """Time that a pull may take beyond the wait, at most; 0 or less if it never pays.

    Args:
        whole_ns: Prefill without the pull.
        settings: How much gain it takes.
    """
    return ceil(whole_ns - rest_ns - max(settings.margin_ns, settings.margin_ratio * whole_ns))


def with_pull(
    found: Prediction,
    facts: RoutingFacts,
    signals: PathSignals,
    costs: CostModel,
    ns_per_byte: float,
    decode_wait: DecodeWait = no_wait,
    held_tokens: int | None = None,
) -> Prediction:
    """The prediction with the local path by way of a pull, where that pays.

    Args:
        facts: Of the request; an obstacle on the way is one for a pull too.
        costs: Compute and bytes.
        ns_per_byte: Worth of a byte, as time.
        held_tokens: Prefix in the pool that pulls, tokens; None is that of the pool that decodes.
    """
    here, there = facts.pd_hit_tokens, facts.pullable_tokens
    if facts.obstacle is not None or there <= here:
        return found
    pull = choose_pull(
        facts.num_prompt_tokens,
        here,
        there,
        wait_ns=signals.local_wait_ns,
        prefill_ns=costs.local_prefill_ns,
        num_bytes=costs.shipped_bytes(
            there, facts.present_tokens if held_tokens is None else held_tokens
        ),
        link=signals.link,
        ns_per_byte=ns_per_byte,
    )
    if pull is None:
        return found
    start_ns = max(signals.local_wait_ns or 0, pull.arrival_ns)
    local_ns = start_ns + costs.local_prefill_ns(facts.num_prompt_tokens - there, there)
    decode_ns = decode_wait(local_ns)
    return found._replace(
        local_ns=local_ns + decode_ns, local_decode_ns=decode_ns, pull_tokens=pull.num_tokens
    )
