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
    """One request. Instants in ns of virtual time, UNSET before they happen."""

    index: int
    """Unique in the workload."""
    arrived_at_ns: int
    """Time when it came; of one that follows another, set when it comes."""
    num_prompt_tokens: int
    num_output_tokens: int
    """Output, tokens; no policy sees it."""
    block_ids: tuple[int, ...] = ()
    """Ids of the prompt's blocks; the last may be a partial one."""
    tenant: str = ""
    """Whose it is; empty if nobody's in particular."""
    followers: tuple[FollowUp, ...] = ()
    """Requests of the same session that wait for its end."""
    decision: Decision | None = None
    outcome: Outcome = Outcome.RUNNING
    attempt: int = 0
    """Counts prefills, also those given up; events of an earlier one are void."""
    num_new_tokens: int = 0
    num_hit_tokens: int = 0
    kept_tokens: int = 0
    """Prefix that a pool kept of a transfer that was cut."""
    kept_in: str = ""
    had_tokens: int = 0
    """Output that its client has from another instance than the one that decodes."""
    relayed_tokens: int = 0
    """Those after the first of the instance that prefilled."""
    routed_at_ns: int = UNSET
    """Time when the last attempt began."""
    prefill_started_at_ns: int = UNSET
    prefilled_at_ns: int = UNSET
    landed_at_ns: int = UNSET
    first_token_at_ns: int = UNSET
    second_token_at_ns: int = UNSET
    """Time when the second one came, if the first one came early."""
    finished_at_ns: int = UNSET
    offloaded: bool = False
    """True if it was ever sent to the PrfaaS cluster."""

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
