"""Verification of received blocks: of the requests that got some, one in N is computed again in the
PD cluster and compared.

    request ends ─► selected? ─► PD engine computes the prompt under another salt
                                       └─► PD pool compares both versions ─► altered: bar the sender

Barred is the pool that sent the altered block (`suspicion.py`), which need not be the
source of the selected transfer. If no pool is to blame for certain, there is an alarm alone.

What counts is what the pool has kept: a transfer that its source stops, or never commits, is
selected and compared like others. Those that are still open some time after their request are
ended, selected or not, so that nothing arrives after a comparison, and no source learns by it which
ones are selected.

One verification runs at a time. It costs the PD cluster the prefill of the prompt, without any
cached prefix.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from prfaas.core.facts import FactStream
from prfaas.core.integrity.sampling import Sampler
from prfaas.core.integrity.suspicion import AlteredBlock, Suspicion, Suspicions, blamed
from prfaas.core.kv.difference_limits import LIMITS, is_altered
from prfaas.core.request.facts import PrefixCopied
from prfaas.errors import PrfaasError
from prfaas.gateway.pools.pool_client import Pools
from prfaas.gateway.routing.transfer_tracker import BlocksReceived
from prfaas.gateway.serving.prefill_leg import PrefillLeg
from prfaas.integrity.barring import Barring
from prfaas.integrity.metrics import VerificationMetrics
from prfaas.integrity.received import BlockPair, Received, View, drawn
from prfaas.logs import log_event
from prfaas.tasks import cancel_all
from prfaas.wire.messages.comparing import Compared
from prfaas.wire.messages.fields import Key

WAITING_MAX = 32
"""Selected transfers that wait; further ones are skipped and counted."""
TRIES_MAX, PAUSE_S = 20, 0.25
"""Attempts to see the end of a transfer, and to find blocks that the engine is still storing."""
_log = logging.getLogger(__name__)

SUSPICIONS = {
    Suspicion.UNKNOWN: "most of its transfers cannot be compared with what this site computes",
    Suspicion.NOT_COMMITTED: "its transfers end without a commit after all blocks have arrived",
}
COPIES_MAX = 4096
"""Copies that are remembered; of older ones the first use is not verified."""
PART = 256
"""Pairs of one message, so that an answer comes in time and names every altered block."""


class Copies:
    """Sources of copied prefixes until a request uses them, by their pool and last hash."""

    def __init__(self) -> None:
        self._sources: OrderedDict[tuple[str, bytes], str] = OrderedDict()

    def note(self, copied: PrefixCopied) -> None:
        """A pool fetches a prefix."""
        if copied.hashes:
            self._sources[copied.pool, copied.hashes[-1]] = copied.source
        while len(self._sources) > COPIES_MAX:
            self._sources.popitem(last=False)

    def take(self, pool: str, hashes: Sequence[bytes]) -> frozenset[str]:
        """Return the sources of the copies that a prompt with these hashes uses, once."""
        if not self._sources:
            return frozenset()
        found = (self._sources.pop((pool, each), "") for each in hashes)
        return frozenset(source for source in found if source)


@dataclass(frozen=True, slots=True)
class VerifiedSite:
    """Engines and pools of a gateway."""

    prefill_leg: PrefillLeg
    pools: Pools

    async def compute(self, engine: str, token_ids: Sequence[int], salt: str) -> bool:
        """Have an engine compute a prompt with a salt; False if it does not."""
        return await self.prefill_leg.compute(engine, token_ids, salt) is not None

    async def compare(
        self,
        pool: str,
        layout_id: bytes,
        pairs: Sequence[tuple[Key, Key]],
        limits: Mapping[str, float],
    ) -> Compared:
        """Have a pool compare blocks of a layout."""
        return await self.pools.client(pool).compare(layout_id, pairs, limits)

    def stop(self, view: View, why: str) -> None:
        """End a transfer at both pools, for a reason in words."""
        self.pools.abort(view, why)


@dataclass(slots=True)
class BlockFindings:
    """Findings of the comparison of a prompt's blocks."""

    num_blocks: int
    """Blocks of the prompt, compared or not."""
    missing: list[BlockPair]
    num_equal: int = 0
    num_different: int = 0
    worst: dict[str, float] = field(default_factory=dict)
    altered: list[AlteredBlock] = field(default_factory=list)

    @property
    def num_compared(self) -> int:
        """Blocks of which both versions were found."""
        return self.num_equal + self.num_different

    def add(self, pairs: Sequence[BlockPair], answer: Compared) -> None:
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
        draw: As in `Sampler`.
        pause_s: Wait between two attempts, seconds.
    """

    def __init__(
        self,
        one_in: int | None,
        limits: Mapping[str, float],
        site: VerifiedSite,
        bars: Barring,
        metrics: VerificationMetrics,
        draw: Callable[[int], int] = secrets.randbelow,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._sampler = None if one_in is None else Sampler(one_in, draw)
        self._limits = {**LIMITS, **limits}
        self._site, self._bars, self.copies = site, bars, Copies()
        self._suspicions = Suspicions()
        self._metrics, self._pause_s = metrics, pause_s
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_on(self) -> bool:
        """True if transfers are verified."""
        return self._sampler is not None

    def follow(self, facts: FactStream) -> None:
        """Offer what requests receive from now on, if transfers are verified."""
        if self.is_on:
            facts.subscribe(PrefixCopied, self.copies.note)
            facts.subscribe(BlocksReceived, self._offer)

    def _offer(self, fact: BlocksReceived) -> None:
        copied = self.copies.take(fact.pool, fact.hashes)
        if not fact.transfers and not copied:
            return
        if fact.is_lossy:
            self.skipped()  # What was rounded is not what an engine computes.
            return
        span = (
            (fact.present_tokens, fact.final_tokens) if fact.transfers else (0, fact.present_tokens)
        )
        self.used(
            Received(
                fact.pool,
                frozenset(view.source for view in fact.transfers) | copied,
                fact.transfers,
                fact.engine,
                fact.layout,
                fact.token_ids,
                fact.hashes,
                fact.cache_salt,
                *span,
            )
        )

    def used(self, received: Received) -> None:
        """A request that got blocks has ended."""
        sampler = self._sampler
        if sampler is None:
            return
        selected = [sampler.takes(source) for source in sorted(received.sources)]  # Each counts.
        if not any(selected):
            if not received.is_over:
                wait_s = TRIES_MAX * self._pause_s
                asyncio.get_running_loop().call_later(wait_s, self._stop_open, received)
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

    def _stop_open(self, received: Received) -> None:
        for view in received.transfers:
            if view.arrival is None:
                self._site.stop(view, "its request is over")

    async def _verify(self, received: Received) -> None:
        for _ in range(TRIES_MAX):  # The pools may report ends after the request's end.
            if received.is_over:
                break
            await asyncio.sleep(self._pause_s)
        self._stop_open(received)
        if received.is_empty:
            self._metrics.ended("empty")
            return
        async with self._turn:
            try:
                found = await self._compared(received)
            except PrfaasError as error:
                found = None
                why = type(error).__name__
                log_event(_log, logging.WARNING, "verification_failed", why=why)
            is_unknown = found is None or not self._judges(found)
            self._suspect(received, is_unknown=is_unknown)
            if found is not None and found.num_compared:
                self._metrics.differed(found.worst)
            if found is None or is_unknown:
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

    def _judges(self, found: BlockFindings) -> bool:
        """Return True if blocks were compared, and some of a type with a limit if any differ."""
        is_of_type = not found.worst or bool(found.worst.keys() & self._limits.keys())
        return bool(found.num_compared) and is_of_type

    def _suspect(self, received: Received, *, is_unknown: bool) -> None:
        stopped = {view.source for view in received.transfers if received.stopped_by(view)}
        for source in sorted(received.sources):
            found = self._suspicions.add(
                source, is_unknown=is_unknown, is_stopped=source in stopped
            )
            if found is not None:
                self._metrics.suspected(found)
                self._bars.suspect(source, SUSPICIONS[found])

    async def _compared(self, received: Received) -> BlockFindings | None:
        """Compare both versions, each block once; None if the engine failed."""
        salt = received.other_salt()
        pairs = await asyncio.to_thread(received.pairs, salt)
        if not pairs or not await self._site.compute(received.engine, received.token_ids, salt):
            return None
        extra = [pair for pair in pairs if pair.is_extra]
        pairs = [pair for pair in pairs if not pair.is_extra]
        found = BlockFindings(num_blocks=len(pairs), missing=drawn(pairs))
        for _ in range(TRIES_MAX):
            left, found.missing = found.missing, []
            await self._add(found, received, left)
            if not any(pair.is_shipped for pair in found.missing):
                break
            await asyncio.sleep(self._pause_s)
        kept = BlockFindings(num_blocks=0, missing=[])
        await self._add(kept, received, drawn(extra))
        found.altered += kept.altered
        for dtype, value in kept.worst.items():
            found.worst[dtype] = max(value, found.worst.get(dtype, 0.0))
        return found

    async def _add(
        self, found: BlockFindings, received: Received, pairs: Sequence[BlockPair]
    ) -> None:
        pool, layout_id = received.pool, received.layout.layout_id
        for start in range(0, len(pairs), PART):
            part = pairs[start : start + PART]
            names = [pair.names for pair in part]
            found.add(part, await self._site.compare(pool, layout_id, names, self._limits))

    def _words(self, received: Received, found: BlockFindings) -> str:
        above = [
            f"{dtype} differs by {value:.3g}, limit {self._limits[dtype]:g}"
            for dtype, value in found.worst.items()
            if is_altered({dtype: value}, self._limits)
        ]
        return (
            f"{found.num_different} of {found.num_different + found.num_equal} blocks of a "
            f"transfer are not what engine {received.engine} computes: {', '.join(above)}"
        )
