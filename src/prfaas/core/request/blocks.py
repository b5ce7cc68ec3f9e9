"""Blocks that a request waits for: a hand-off, a pulled prefix, or both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prfaas.core.request.actions import Abort, AnyAction, FellBack, Release
from prfaas.core.request.events import Blocks
from prfaas.core.request.fleet import Breakers
from prfaas.core.resilience.circuit_breaker import Told
from prfaas.core.transfer.transfer_state import TransferEnd

POOL_DOWN = "pool_down"
"""A pool is not heard any more."""
TIMEOUT = "timeout"
"""No pool reported an end."""
UNKNOWN = "unknown"
"""Blocks are missing though their transfer ended well."""
WHOLE = "whole"
"""Outcome of a pull whose prefix the engine found."""
ENDED_EARLY = "ended_early"
"""The request ended, or its engine did, before the prefix was of use."""
BLOCKS_MISSING = "blocks_missing"


@dataclass(slots=True)
class Movement:
    """Blocks on their way between two pools, or within one.

    Attributes:
        source: Pool that sends.
        destination: Pool that receives.
        num_tokens: Prefix that is at the destination once all have arrived.
        is_open: They are neither aborted nor released.
        end: What the destination reported; None before.
        fault: Why they cannot arrive any more, the destination's word before the source's; empty
            while they can.
    """

    source: str
    destination: str
    num_tokens: int
    is_open: bool = True
    end: TransferEnd | None = None
    fault: str = ""

    @property
    def link(self) -> tuple[str, str]:
        """Both ends of their way."""
        return self.source, self.destination

    @property
    def crosses_link(self) -> bool:
        """True if they leave their pool; of others no pool reports an end."""
        return self.source != self.destination

    @property
    def is_coming(self) -> bool:
        """True if more of them may arrive that is waited for."""
        return self.is_open and self.crosses_link and self.end is None and not self.fault

    def ended(self, kind: TransferEnd, *, at_destination: bool) -> bool:
        """Note a pool's report.

        Returns:
            True if it is the first of the destination, after which the link carries nothing more.
        """
        is_last = at_destination and self.end is None
        if is_last:
            self.end = kind
        if kind is not TransferEnd.COMMITTED and (at_destination or not self.fault):
            self.fault = kind
        return is_last

    @property
    def is_lost(self) -> bool:
        """True if not all of them can arrive."""
        return bool(self.fault) and self.end is not TransferEnd.COMMITTED

    @property
    def failure(self) -> str:
        """Why blocks are missing: one of a bounded set."""
        if self.fault:
            return self.fault
        return UNKNOWN if self.end is not None or not self.crosses_link else TIMEOUT


class OnTheWay:
    """The blocks of one request, opened once each, and aborted or released once.

    Args:
        breakers: Of the links that they cross.
    """

    def __init__(self, breakers: Breakers) -> None:
        self._breakers = breakers
        self._all: dict[Blocks, Movement] = {}
        self.pull_outcome = ""
        """What came of the pull, one of a bounded set; empty while an engine may wait for it."""

    def get(self, which: Blocks) -> Movement | None:
        """Blocks of a kind; None if the request has none."""
        return self._all.get(which)

    def open(self, which: Blocks) -> Movement | None:
        """The same, unless they were aborted or released."""
        found = self._all.get(which)
        return found if found is not None and found.is_open else None

    def begin(self, which: Blocks, movement: Movement) -> None:
        """Blocks start on their way."""
        self._all[which] = movement
        if movement.crosses_link:
            self._breakers.began(movement.link)

    def abort(self, which: Blocks, why: str) -> Iterator[AnyAction]:
        """Give blocks up, if they are open."""
        blocks = self.open(which)
        if blocks is None:
            return
        blocks.is_open = False
        if blocks.crosses_link:
            self._breakers.ended(blocks.link, Told.NOTHING)
            yield Abort(which, why)

    def abort_all(self, why: str) -> Iterator[AnyAction]:
        """Nobody waits for any blocks: the request ended, or the engine that waited."""
        yield from self.abort(Blocks.HAND_OFF, why)
        if self.open(Blocks.PULL) is not None:
            self.pull_outcome = ENDED_EARLY
            yield from self.abort(Blocks.PULL, why)

    def judge_hand_off(self, found_tokens: int) -> Iterator[AnyAction]:
        """The answer is complete: did decode find what was handed over?"""
        blocks = self.open(Blocks.HAND_OFF)
        if blocks is None:
            return
        is_short = found_tokens < blocks.num_tokens
        if is_short:
            why = f"decode found {found_tokens} of {blocks.num_tokens} tokens"
            yield FellBack("transfer", blocks.failure, why)
        if is_short and blocks.end is None:
            yield from self.abort(Blocks.HAND_OFF, "decode went on without its blocks")
        else:
            yield from self._release(Blocks.HAND_OFF, blocks)

    def judge_pull(self, cached_tokens: int) -> Iterator[AnyAction]:
        """The answer is complete: did the engine find the prefix?"""
        blocks = self.open(Blocks.PULL)
        if blocks is None:
            return
        is_short = cached_tokens < blocks.num_tokens
        failure = BLOCKS_MISSING if blocks.failure == UNKNOWN else blocks.failure
        self.pull_outcome = failure if is_short else WHOLE
        if is_short and blocks.end is None:
            yield from self.abort(Blocks.PULL, "the engine went on without it")
        else:
            yield from self._release(Blocks.PULL, blocks)
        if is_short:
            why = f"the engine found {cached_tokens} of {blocks.num_tokens} tokens"
            yield FellBack("pull", failure, why)

    def _release(self, which: Blocks, blocks: Movement) -> Iterator[AnyAction]:
        blocks.is_open = False
        if blocks.crosses_link:
            yield Release(which)
