"""The routing policies that can be selected, behind one interface.

| name | rule |
|---|---|
| `local` | never offload |
| `remote` | always offload: the naive heterogeneous design |
| `paper` | static threshold, with the paper's scarce and abundant rules |
| `observed` | the threshold; observed first tokens may keep a prompt local (`first_tokens`) |
| `adaptive` | the threshold as prior; predicted completion on both paths may overrule it |
| `cost` | least cost of compute, bytes and time (`core/market`); the threshold decides nothing |

No policy sees output lengths, or anything else that a gateway would not know.

Choice between a pull of a cached prefix from another cluster and its recomputation.

Seconds of prefill against bytes on a link. A byte has a worth in time: what the operator pays for
it, over what a second of a request's time is worth. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, exp, log

from prfaas.core.routing.decision import Decision, Path, Reason, RoutingFacts, judge
from prfaas.core.routing.predictions import (
    NO_WAIT,
    CostModel,
    DecodeWait,
    LinkState,
    PathSignals,
    Prediction,
)


@dataclass(frozen=True, slots=True)
class PullChoice:
    """A prefix to fetch before prefill."""

    num_tokens: int
    """Tokens beyond what is there already."""
    num_bytes: int
    arrival_ns: int
    """From now until it is there."""


@dataclass(frozen=True, slots=True)
class PullSettings:
    """Settings of pulls."""

    margin_ratio: float = 0.05
    """Gain, as a share of what recomputing takes in all, below which it is not."""
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
    decode_wait: DecodeWait = NO_WAIT,
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
    decode_ns = decode_wait.after(local_ns)
    return found._replace(
        local_ns=local_ns + decode_ns, local_decode_ns=decode_ns, pull_tokens=pull.num_tokens
    )


class PolicyName(StrEnum):
    """Policies by name."""

    LOCAL = "local"
    REMOTE = "remote"
    PAPER = "paper"
    OBSERVED = "observed"
    ADAPTIVE = "adaptive"
    COST = "cost"


class Bandwidth(StrEnum):
    """The paper's two regimes."""

    SCARCE = "scarce"
    ABUNDANT = "abundant"


@dataclass(slots=True)
class LocalPolicy:
    """Never offload."""

    offload_threshold: int = 0

    def decide(self, facts: RoutingFacts, found: Prediction) -> Decision:
        """LOCAL."""
        return _told(Path.LOCAL, Reason.ALWAYS_LOCAL, facts, self.offload_threshold, found)


@dataclass(slots=True)
class RemotePolicy:
    """Always offload, unless it is impossible."""

    offload_threshold: int = 0

    def decide(self, facts: RoutingFacts, found: Prediction) -> Decision:
        """REMOTE, unless something stands in the way."""
        path = Path.REMOTE if facts.obstacle is None else Path.LOCAL
        reason = facts.obstacle or Reason.ALWAYS_REMOTE
        return _told(path, reason, facts, self.offload_threshold, found)


@dataclass(slots=True)
class PaperPolicy:
    """The paper's rule with a static threshold.

    References:
        arXiv:2604.15039, section on routing.
    """

    offload_threshold: int
    bandwidth: Bandwidth = Bandwidth.SCARCE
    """SCARCE judges by the PD cluster's cache alone. ABUNDANT takes the longer of it and the PrfaaS
    pool, and pulls the latter over the link when it is the longer one."""

    def decide(self, facts: RoutingFacts, found: Prediction) -> Decision:
        """Compare the incremental length with the threshold."""
        t = self.offload_threshold
        if self.bandwidth is Bandwidth.SCARCE:
            return _told(*judge(facts, facts.num_new_tokens, t), facts, t, found)
        best = max(facts.pd_hit_tokens, facts.pullable_tokens)
        new, pull = facts.num_prompt_tokens - best, 0
        path, reason = judge(facts, new, t)
        if reason is Reason.BELOW_THRESHOLD:
            pull = best - facts.pd_hit_tokens if facts.obstacle is None else 0
            new = facts.num_new_tokens - pull
        return Decision(path, reason, new, t, found.local_ns, found.remote_ns, pull)


@dataclass(frozen=True, slots=True)
class AdaptiveSettings:
    """Settings of the margin for predictions to overrule the threshold."""

    margin_ratio: float = 0.10
    """Gain, as a share of the usual path's prediction, below which nothing changes."""
    margin_ns: int = 200_000_000
    prior_weight: float = 0.5
    """How much more gain a request needs for each factor of e that its length is away from the
    threshold: long prompts profit most from fast prefill, and a short one in their place costs
    everybody who waits behind it. The threshold itself follows the requests, see `balance`: a plan
    that is off loses its weight."""
    hysteresis_ratio: float = 0.5
    """Share of the margins that keeps an overruling going, in (0, 1]."""
    ttft_max_ns: int | None = None
    """Target of the time to first token; None is no target."""
    headroom_ratio: float = 0.8
    """Share of the target that the other path may be predicted to take. Beyond it the threshold
    stays: what has to be late shall not make the other path late too. Where both paths miss the
    target, the one that misses it by less is taken."""
    lost_ratio: float = 3.0
    """Targets from which on the usual path counts as lost. Then the other path is filled up to the
    whole target: its headroom would have no benefit."""


class AdaptivePolicy:
    """The threshold as prior, overruled where the other path is predicted to be clearly faster.

    Without predictions the threshold's decision stays, and the decision says what is missing.

    Args:
        offload_threshold: t, tokens; a control loop may move it.
        settings: How readily predictions overrule it.
    """

    def __init__(
        self, offload_threshold: int, settings: AdaptiveSettings = AdaptiveSettings()
    ) -> None:
        self.offload_threshold = offload_threshold
        self._settings = settings
        self._overruling = dict.fromkeys(Path, False)

    def decide(self, facts: RoutingFacts, found: Prediction) -> Decision:
        """The threshold's decision, or the other path where that is clearly faster."""
        new = facts.num_new_tokens
        path, reason = judge(facts, new, self.offload_threshold)
        if facts.obstacle is None and self._overrule(path, new, found):
            remote = path is Path.LOCAL
            path = Path.REMOTE if remote else Path.LOCAL
            reason = Reason.FASTER_REMOTE if remote else Reason.FASTER_LOCAL
        return Decision(
            path,
            reason,
            new,
            self.offload_threshold,
            found.local_ns,
            found.remote_ns,
            found.pull_tokens if path is Path.LOCAL else 0,
            found.missing,
        )

    def _overrule(self, usual: Path, num_new_tokens: int, found: Prediction) -> bool:
        here, there = found.local_ns, found.remote_ns
        if here is None or there is None:
            return False
        local = usual is Path.LOCAL
        if not local:
            here, there = there, here
        settings = self._settings
        target_ns = settings.ttft_max_ns
        # Where both paths are late, the less late one is taken.
        if target_ns is not None and min(here, there) <= target_ns:
            is_lost = here > settings.lost_ratio * target_ns
            if there > settings.headroom_ratio * target_ns and not is_lost:
                return False
        here += 0 if local else found.bytes_ns
        there += found.bytes_ns + found.delay_ns if local else 0
        ease = settings.hysteresis_ratio if self._overruling[usual] else 1.0
        distance = abs(log(max(num_new_tokens, 1) / max(self.offload_threshold, 1)))
        needed = there * exp(settings.prior_weight * distance)
        margin = max(settings.margin_ns, settings.margin_ratio * here)
        overruled = self._overruling[usual] = needed + ease * margin < here
        return overruled


Policy = LocalPolicy | RemotePolicy | PaperPolicy | AdaptivePolicy
"""Decides where a request is prefilled. May keep state; does no I/O; costs O(1)."""


def make_policy(
    name: PolicyName,
    offload_threshold: int,
    bandwidth: Bandwidth = Bandwidth.SCARCE,
    ttft_max_ns: int | None = None,
) -> Policy:
    """The policy of a name; only `adaptive` uses the TTFT target."""
    match name:
        case PolicyName.LOCAL:
            return LocalPolicy(offload_threshold)
        case PolicyName.REMOTE:
            return RemotePolicy(offload_threshold)
        case PolicyName.PAPER:
            return PaperPolicy(offload_threshold, bandwidth)
        case PolicyName.OBSERVED | PolicyName.COST:
            return PaperPolicy(offload_threshold)
        case PolicyName.ADAPTIVE:
            return AdaptivePolicy(offload_threshold, AdaptiveSettings(ttft_max_ns=ttft_max_ns))


def _told(
    path: Path, reason: Reason, facts: RoutingFacts, offload_threshold: int, found: Prediction
) -> Decision:
    """A decision with the predictions that it was made beside."""
    new = facts.num_new_tokens
    return Decision(path, reason, new, offload_threshold, found.local_ns, found.remote_ns)
