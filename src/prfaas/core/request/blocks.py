"""Blocks that a request waits for: a hand-off, a pulled prefix, or both."""

from __future__ import annotations

from prfaas.core.request.actions import Abort, AnyAction, FellBack, Release
from prfaas.core.request.events import Blocks
from prfaas.core.resilience.circuit_breaker import BreakerOutcome
from prfaas.core.resilience.quarantine import Guards
from prfaas.core.transfer.transfer_state import LINK_FAULTS, TransferEnd
from prfaas.records import MutableRecord

POOL_DOWN = "pool_down"
"""The event stream of a pool is lost."""
TIMEOUT = "timeout"
"""No pool has reported an end."""
UNKNOWN = "unknown"
"""Blocks are missing though their transfer ended well."""
WHOLE = "whole"
"""Outcome of a pull whose prefix the engine found."""
ENDED_EARLY = "ended_early"
"""The request ended, or its engine did, before the prefix was of use."""
BLOCKS_MISSING = "blocks_missing"
_HAND_OFF, _PULL = Blocks.HAND_OFF, Blocks.PULL
_COMMITTED, _GOOD = TransferEnd.COMMITTED, BreakerOutcome.GOOD
_RELEASE_HAND_OFF, _RELEASE_PULL = Release(_HAND_OFF), Release(_PULL)


class Movement(MutableRecord):
    """Blocks in transit between two pools, or within one."""

    source: str
    destination: str
    num_tokens: int
    """Prefix that is at the destination once all have arrived."""
    is_open: bool = True
    """They are neither aborted nor released."""
    end: TransferEnd | None = None
    """Report of the destination; None before."""
    fault: str = ""
    """Why they cannot arrive any more, the destination's word before the source's; empty while they
    can."""
    crosses_link: bool = False
    """True if they leave their pool; of others no pool reports an end."""
    is_coming: bool = False
    """True if more of them may arrive that is waited for."""

    def __post_init__(self) -> None:
        self.crosses_link = self.is_coming = self.source != self.destination

    @property
    def link(self) -> tuple[str, str]:
        """Both ends of their way."""
        return self.source, self.destination

    def close(self) -> None:
        """End the wait for them."""
        self.is_open = self.is_coming = False

    def lose(self, fault: str) -> None:
        """They cannot arrive any more."""
        self.fault, self.is_coming = fault, False

    def ended(self, kind: TransferEnd, *, at_destination: bool) -> bool:
        """Note a pool's report.

        Returns:
            True if it is the first of the destination, after which the link carries nothing more.
        """
        is_last = at_destination and self.end is None
        if is_last:
            self.end, self.is_coming = kind, False
        if kind is not _COMMITTED and (at_destination or not self.fault):
            self.lose(kind)
        return is_last

    @property
    def is_lost(self) -> bool:
        """True if not all of them can arrive."""
        return bool(self.fault) and self.end is not _COMMITTED

    @property
    def failure(self) -> str:
        """Reason for missing blocks: one of a bounded set."""
        if self.fault:
            return self.fault
        return UNKNOWN if self.end is not None or not self.crosses_link else TIMEOUT


class RequestTransfers:
    """The blocks of one request, opened once each, and aborted or released once.

    Args:
        breakers: Of the links that they cross.
    """

    __slots__ = ("_breakers", "hand_off", "pull", "pull_outcome")

    def __init__(self, breakers: Guards) -> None:
        self._breakers = breakers
        self.hand_off: Movement | None = None
        self.pull: Movement | None = None
        self.pull_outcome = ""
        """Outcome of the pull, one of a bounded set; empty while an engine may wait for it."""

    def get(self, which: Blocks) -> Movement | None:
        """Blocks of a kind; None if the request has none."""
        return self.pull if which is _PULL else self.hand_off

    def open(self, which: Blocks) -> Movement | None:
        """The same, unless they were aborted or released."""
        found = self.pull if which is _PULL else self.hand_off
        return found if found is not None and found.is_open else None

    def begin(self, which: Blocks, movement: Movement, now_ns: int) -> None:
        """A transfer of blocks starts."""
        if which is _PULL:
            self.pull = movement
        else:
            self.hand_off = movement
        if movement.crosses_link:
            self._breakers.began(movement.link, now_ns)

    def abort(self, which: Blocks, why: str, now_ns: int) -> list[AnyAction]:
        """Give blocks up, if they are open."""
        blocks = self.open(which)
        if blocks is None:
            return []
        blocks.close()
        if not blocks.crosses_link:
            return []
        self._breakers.ended(blocks.link, BreakerOutcome.NOTHING, now_ns)
        return [Abort(which, why)]

    def abort_all(self, why: str, now_ns: int) -> list[AnyAction]:
        """End all waits for blocks: the request or the waiting engine has ended."""
        aborted = self.abort(_HAND_OFF, why, now_ns)
        if self.open(_PULL) is not None:
            self.pull_outcome = ENDED_EARLY
            aborted += self.abort(_PULL, why, now_ns)
        return aborted

    def judge_hand_off(self, found_tokens: int, now_ns: int) -> list[AnyAction]:
        """The answer is complete: did decode find what was handed over?"""
        blocks = self.hand_off
        if blocks is None or not blocks.is_open:
            return []
        if found_tokens >= blocks.num_tokens:
            return self._release(_HAND_OFF, blocks)
        why = f"decode found {found_tokens} of {blocks.num_tokens} tokens"
        fallback = FellBack("transfer", blocks.failure, why)
        if blocks.end is None:
            left = "decode went on without its blocks"
            return [fallback, *self.abort(_HAND_OFF, left, now_ns)]
        return [fallback, *self._release(_HAND_OFF, blocks)]

    def judge_pull(self, cached_tokens: int, now_ns: int) -> list[AnyAction]:
        """The answer is complete: did the engine find the prefix?"""
        blocks = self.open(_PULL)
        if blocks is None:
            return []
        is_short = cached_tokens < blocks.num_tokens
        failure = BLOCKS_MISSING if blocks.failure == UNKNOWN else blocks.failure
        self.pull_outcome = failure if is_short else WHOLE
        if is_short and blocks.end is None:
            closed = self.abort(_PULL, "the engine went on without it", now_ns)
        else:
            closed = self._release(_PULL, blocks)
        if is_short:
            why = f"the engine found {cached_tokens} of {blocks.num_tokens} tokens"
            closed.append(FellBack("pull", failure, why))
        return closed

    def _release(self, which: Blocks, blocks: Movement) -> list[AnyAction]:
        blocks.close()
        if not blocks.crosses_link:
            return []
        return [_RELEASE_PULL if which is _PULL else _RELEASE_HAND_OFF]


def told_of_link(end: TransferEnd, num_missing: int = 0) -> BreakerOutcome:
    """Effect of the end of a transfer on the breaker of its link.

    One whose source lacked blocks says nothing: pages that are never kept would look like a link
    that works.
    """
    if end is _COMMITTED:
        return BreakerOutcome.NOTHING if num_missing else _GOOD
    return BreakerOutcome.FAILED if end in LINK_FAULTS else BreakerOutcome.NOTHING
