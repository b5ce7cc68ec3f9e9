"""Verification of transfers: one in N is computed again in the PD cluster and compared.

    request ends ─► selected? ─► PD engine computes the prompt under another salt
                                       └─► PD pool compares both versions ─► altered: bar the sender

Barred is the pool that sent the altered block (`core/integrity/blame.py`), which need not be the
source of the selected transfer. If no pool is to blame for certain, there is an alarm alone.

One verification runs at a time. It costs the PD cluster the prefill of the prompt, without any
cached prefix.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prfaas.core.integrity.blame import AlteredBlock, blamed
from prfaas.core.integrity.difference import LIMITS, is_altered
from prfaas.core.integrity.sampling import Sampler
from prfaas.core.transfer.transfer_state import TransferState
from prfaas.errors import PrfaasError
from prfaas.integrity.metrics import VerificationMetrics
from prfaas.integrity.received import Pair, Received, drawn
from prfaas.logs import log_event
from prfaas.tasks import cancel_all
from prfaas.wire.messages.comparing import Compared
from prfaas.wire.messages.fields import Key

WAITING_MAX = 32
"""Selected transfers that wait; further ones are skipped and counted."""
TRIES_MAX, PAUSE_S = 20, 0.25
"""Attempts to see the end of a transfer, and to find blocks that the engine is still storing."""
_log = logging.getLogger(__name__)

Compute = Callable[[str, Sequence[int], str], Awaitable[bool]]
"""Has an engine compute a prompt with a salt; False if it does not."""
Compare = Callable[
    [str, bytes, Sequence[tuple[Key, Key]], Mapping[str, float]], Awaitable[Compared]
]
"""Has a pool compare blocks of a layout, with limits."""
PART = 256
"""Pairs of one message, so that an answer comes in time and names every altered block."""


class Bars(Protocol):
    """The bar of sources."""

    async def bar(self, source: str, why: str) -> None:
        """Bar a source, for a reason in words."""

    def alarm(self, why: str) -> None:
        """Report altered blocks of an uncertain source."""


@dataclass(slots=True)
class Found:
    """Findings of the comparison of a prompt's blocks."""

    num_blocks: int
    """Blocks of the prompt, compared or not."""
    missing: list[Pair]
    num_equal: int = 0
    num_different: int = 0
    worst: dict[str, float] = field(default_factory=dict)
    altered: list[AlteredBlock] = field(default_factory=list)

    @property
    def num_compared(self) -> int:
        """Blocks of which both versions were found."""
        return self.num_equal + self.num_different

    def add(self, pairs: Sequence[Pair], answer: Compared) -> None:
        """Add the answer for some pairs."""
        self.num_equal += answer.num_equal
        self.num_different += answer.num_different
        for dtype, value in answer.worst.items():
            self.worst[dtype] = max(value, self.worst.get(dtype, 0.0))
        for block in answer.altered:
            if block.place < len(pairs):
                at = pairs[block.place].position
                self.altered.append(AlteredBlock(at, block.sender, block.is_inherited))
        self.missing += [pairs[place] for place in answer.missing if place < len(pairs)]


class Verifier:
    """Verifies transfers of a gateway.

    Args:
        one_in: N; None verifies nothing.
        limits: Largest differences by type that take precedence over `LIMITS`.
        compute: Computes a prompt.
        compare: Compares blocks.
        bars: Bars sources.
        metrics: Count outcomes.
        draw: As in `Sampler`.
        pause_s: Wait between two attempts, seconds.
    """

    def __init__(
        self,
        one_in: int | None,
        limits: Mapping[str, float],
        compute: Compute,
        compare: Compare,
        bars: Bars,
        metrics: VerificationMetrics,
        draw: Callable[[int], int] = secrets.randbelow,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._sampler = None if one_in is None else Sampler(one_in, draw)
        self._limits = {**LIMITS, **limits}
        self._compute, self._compare, self._bars = compute, compare, bars
        self._metrics, self._pause_s = metrics, pause_s
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_on(self) -> bool:
        """True if transfers are verified."""
        return self._sampler is not None

    def used(self, received: Received) -> None:
        """A request has used the blocks of a transfer."""
        if self._sampler is None or not self._sampler.takes(received.transfer.source):
            return
        if len(self._tasks) >= WAITING_MAX:
            self.skipped()
            return
        task = asyncio.create_task(self._verify(received))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def skipped(self) -> None:
        """Count a transfer that cannot be verified."""
        if self.is_on:
            self._metrics.ended("skipped")

    async def close(self) -> None:
        """Break off."""
        await cancel_all(self._tasks)

    async def _verify(self, received: Received) -> None:
        async with self._turn:
            try:
                found = await self._compared(received)
            except PrfaasError as error:
                found = None
                why = type(error).__name__
                log_event(_log, logging.WARNING, "verification_failed", why=why)
            if found is None or not (found.num_equal or found.num_different):
                self._metrics.ended("unknown")
                return
            self._metrics.differed(found.worst)
            if found.worst and not found.worst.keys() & self._limits.keys():
                self._metrics.ended("unknown")
                return
            altered = is_altered(found.worst, self._limits)
            sources = blamed(found.altered, is_complete=found.num_compared == found.num_blocks)
            outcome = "equal" if not altered else "altered" if sources else "unattributed"
            self._metrics.ended(outcome, len(received.token_ids))
        why = self._words(received, found)
        if outcome == "unattributed":
            self._bars.alarm(why)
        for source in sorted(sources):
            await self._bars.bar(source, why)

    async def _compared(self, received: Received) -> Found | None:
        """Compare both versions, each block once; None if the transfer or the engine failed."""
        if not await self._is_committed(received):
            return None
        salt = received.other_salt()
        pairs = await asyncio.to_thread(received.pairs, salt)
        if not pairs or not await self._compute(received.engine, received.token_ids, salt):
            return None
        pool, layout_id = received.transfer.destination, received.layout.layout_id
        found = Found(num_blocks=len(pairs), missing=drawn(pairs))
        for _ in range(TRIES_MAX):
            left, found.missing = found.missing, []
            for start in range(0, len(left), PART):
                part = left[start : start + PART]
                names = [pair.names for pair in part]
                found.add(part, await self._compare(pool, layout_id, names, self._limits))
            if not any(pair.is_shipped for pair in found.missing):
                break
            await asyncio.sleep(self._pause_s)
        return found

    async def _is_committed(self, received: Received) -> bool:
        """Wait for the pools' reports of a transfer, which may come after the request's end."""
        for _ in range(TRIES_MAX):
            if received.transfer.state in tuple(TransferState):
                break
            await asyncio.sleep(self._pause_s)
        return received.transfer.state == TransferState.COMMITTED

    def _words(self, received: Received, found: Found) -> str:
        above = [
            f"{dtype} differs by {value:.3g}, limit {self._limits[dtype]:g}"
            for dtype, value in found.worst.items()
            if is_altered({dtype: value}, self._limits)
        ]
        return (
            f"{found.num_different} of {found.num_different + found.num_equal} blocks of a "
            f"transfer are not what engine {received.engine} computes: {', '.join(above)}"
        )
