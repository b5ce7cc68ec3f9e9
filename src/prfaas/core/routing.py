"""Where a request is prefilled, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Path(StrEnum):
    """Where the prompt is prefilled."""

    LOCAL = "local"
    REMOTE = "remote"


class Reason(StrEnum):
    """Why a request went where it went; bounded, so that it can label a metric."""

    ABOVE_THRESHOLD = "above_threshold"
    BELOW_THRESHOLD = "below_threshold"
    LINK_DOWN = "link_down"
    NO_PREFILL_INSTANCE = "no_prefill_instance"
    LAYOUT_MISMATCH = "layout_mismatch"
    NOT_OFFLOADABLE = "not_offloadable"
    """The request needs something that only one engine alone can give, prompt logprobs say."""


@dataclass(frozen=True, slots=True)
class RoutingFacts:
    """What is known when a request arrives. Lengths in tokens.

    Attributes:
        num_prompt_tokens: Length of the prompt.
        pd_hit_tokens: Usable cached prefix in the PD cluster.
        prfaas_hit_tokens: Usable cached prefix in the PrfaaS cluster.
        offloadable: Whether prefill and decode of this request may be split at all.
        prefill_instance_ready: Whether a PrfaaS engine is healthy.
        link_up: Whether the PrfaaS pool can reach the PD pool.
        layouts_agree: Whether blocks of one side mean the same on the other.
    """

    num_prompt_tokens: int
    pd_hit_tokens: int = 0
    prfaas_hit_tokens: int = 0
    offloadable: bool = True
    prefill_instance_ready: bool = True
    link_up: bool = True
    layouts_agree: bool = True


@dataclass(frozen=True, slots=True)
class Decision:
    """Where to prefill.

    Attributes:
        path: LOCAL or REMOTE.
        reason: Why, as a label.
        num_new_tokens: Incremental length the rule looked at, tokens.
        offload_threshold: The threshold it was compared with, tokens.
    """

    path: Path
    reason: Reason
    num_new_tokens: int
    offload_threshold: int

    @property
    def explanation(self) -> str:
        """The reason as a person would say it."""
        compared = f"{self.num_new_tokens:,} new tokens against {self.offload_threshold:,}"
        match self.reason:
            case Reason.ABOVE_THRESHOLD:
                return f"long: {compared}"
            case Reason.BELOW_THRESHOLD:
                return f"short: {compared}"
            case Reason.LINK_DOWN:
                return f"long ({compared}), but the link is down"
            case Reason.NO_PREFILL_INSTANCE:
                return f"long ({compared}), but no PrfaaS engine is ready"
            case Reason.LAYOUT_MISMATCH:
                return f"long ({compared}), but the clusters' KV layouts differ"
            case Reason.NOT_OFFLOADABLE:
                return f"long ({compared}), but the request cannot be split"


@dataclass(frozen=True, slots=True)
class ThresholdPolicy:
    """The paper's rule with scarce bandwidth and a static threshold.

    A request goes to the PrfaaS cluster when its incremental length, judged by the PD cluster's own
    cache, exceeds the threshold and nothing stands in the way.

    Attributes:
        offload_threshold: t, tokens.

    References:
        arXiv:2604.15039, section on routing: `l_total - l_pd <= t → PD-P, else PrfaaS`.
    """

    offload_threshold: int

    def decide(self, facts: RoutingFacts) -> Decision:
        """Decide for one request. Pure."""
        num_new_tokens = facts.num_prompt_tokens - facts.pd_hit_tokens
        path, reason = self._judge(facts, num_new_tokens)
        return Decision(path, reason, num_new_tokens, self.offload_threshold)

    def _judge(self, facts: RoutingFacts, num_new_tokens: int) -> tuple[Path, Reason]:
        if num_new_tokens <= self.offload_threshold:
            return Path.LOCAL, Reason.BELOW_THRESHOLD
        if not facts.offloadable:
            return Path.LOCAL, Reason.NOT_OFFLOADABLE
        if not facts.prefill_instance_ready:
            return Path.LOCAL, Reason.NO_PREFILL_INSTANCE
        if not facts.layouts_agree:
            return Path.LOCAL, Reason.LAYOUT_MISMATCH
        if not facts.link_up:
            return Path.LOCAL, Reason.LINK_DOWN
        return Path.REMOTE, Reason.ABOVE_THRESHOLD
