"""A simulated request and what happened to it."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.core.request.events import Outcome
from prfaas.core.routing.decision import Decision
from prfaas.records import Record

UNSET = -1


class FollowUp(Record, frozen=True):
    """A request that comes `after_ns` after another has ended, if that is before `until_ns`."""

    request: Request
    after_ns: int
    until_ns: int


@dataclass(slots=True, eq=False)
class Request:
    """One request. Instants in ns of virtual time, UNSET before they happen.

    Attributes:
        index: Unique in the workload.
        arrived_at_ns: When it came; of one that follows another, set when it comes.
        num_output_tokens: Output, tokens; no policy sees it.
        block_ids: Ids of the prompt's blocks; the last may be a partial one.
        tenant: Whose it is; empty if nobody's in particular.
        followers: Requests of the same session that wait for its end.
        attempt: Counts prefills, also those given up; events of an earlier one are void.
        kept_tokens: Prefix that a pool kept of a transfer that was cut.
        had_tokens: Output that its client has from another instance than the one that decodes.
        routed_at_ns: When the last attempt began.
        relayed_tokens: Those after the first of the instance that prefilled.
        second_token_at_ns: When the second one came, if the first one came early.
        offloaded: True if it was ever sent to the PrfaaS cluster.
    """

    index: int
    arrived_at_ns: int
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()
    tenant: str = ""
    followers: tuple[FollowUp, ...] = ()
    decision: Decision | None = None
    outcome: Outcome = Outcome.RUNNING
    attempt: int = 0
    num_new_tokens: int = 0
    num_hit_tokens: int = 0
    kept_tokens: int = 0
    kept_in: str = ""
    had_tokens: int = 0
    relayed_tokens: int = 0
    routed_at_ns: int = UNSET
    prefill_started_at_ns: int = UNSET
    prefilled_at_ns: int = UNSET
    landed_at_ns: int = UNSET
    first_token_at_ns: int = UNSET
    second_token_at_ns: int = UNSET
    finished_at_ns: int = UNSET
    offloaded: bool = False

    def resume_after(self, hit_tokens: int, now_ns: int) -> None:
        """Begin an attempt that computes the prompt after a prefix."""
        self.attempt += 1
        self.routed_at_ns, self.num_hit_tokens = now_ns, hit_tokens
        self.num_new_tokens = self.num_prompt_tokens - hit_tokens

    @property
    def ttft_ns(self) -> int:
        """Time to first token."""
        return self.first_token_at_ns - self.arrived_at_ns

    @property
    def tpot_ns(self) -> float:
        """Mean time per output token after the first."""
        steps = self.num_output_tokens - 1
        return (self.finished_at_ns - self.first_token_at_ns) / steps if steps > 0 else 0.0
