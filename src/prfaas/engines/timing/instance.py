"""One instance: from a prompt to its tokens, in the time of its profile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from prfaas.core.kv.blocks import BlockKey, GroupKind, block_key
from prfaas.core.kv.naming.prompt_names import prompt_hashes
from prfaas.engines.orders import Order, PushOrder
from prfaas.engines.timing.blocks import CLEAN, NewBlock, PrefixNames, block_bytes, stained
from prfaas.engines.timing.device_cache import DeviceCache
from prfaas.engines.timing.kv_events import Events
from prfaas.engines.timing.page_tier import PageTier
from prfaas.engines.timing.profile import InstanceProfile
from prfaas.engines.timing.scheduler import Scheduler, Sequence, Step
from prfaas.engines.timing.tier import TimingTier
from prfaas.tasks import cancel_all
from prfaas.units import NS_PER_S


@dataclass(slots=True, eq=False)
class PromptWork:
    """A prompt that an instance works on."""

    request: str
    tokens: list[int]
    num_output_max: int
    """Tokens of each answer."""
    width: int = 1
    cache_salt: str | None = None
    """Mixed into the names of its blocks."""
    order: Order | None = None
    """Its instructions about transfers."""
    interval: int = 1
    """Tokens of each answer between two events."""
    hashes: list[bytes] = field(default_factory=list)
    """Hash chain of the prompt."""
    stain: bytes = CLEAN
    """Stain of its blocks so far."""
    is_void: bool = False
    """True if its blocks were dropped since: none of its blocks is stored any more."""
    sequence: Sequence = field(default_factory=lambda: Sequence(0, 1))
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed."""
        return self.sequence.hit_tokens

    @property
    def is_due(self) -> bool:
        """Return True if somebody waits for the tokens there are: the first, every so many, the
        last."""
        count = self.sequence.num_output
        return count == 1 or count % self.interval == 0 or self.sequence.is_done


@dataclass(slots=True)
class Counts:
    """Counters since the start."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    external_queried_tokens: int = 0
    external_hit_tokens: int = 0
    stained: int = 0
    steps: int = 0
    late_ns: int = 0
    """How far the event loop was behind the profile at most, ns of the wall clock."""
    late_sum_ns: int = 0
    """The same of all steps together."""


class TimedInstance:
    """A queue, a batch, a prefix cache, and a pool node to share blocks with.

    Args:
        tier: Its pool node; None without.
        events: Observer of its prefix cache.
        cache_tokens: Size of its prefix cache, tokens.
        time_scale: Seconds of the wall clock for a second of the profile.
    """

    def __init__(
        self,
        name: str,
        profile: InstanceProfile,
        tier: TimingTier | PageTier | None,
        events: Events,
        cache_tokens: int,
        time_scale: float,
    ) -> None:
        self.name, self.profile, self.tier, self.events = name, profile, tier, events
        self.layout = profile.layout
        self.counts = Counts()
        self._span = self.layout.boundary_tokens
        self._names = PrefixNames(self.layout)
        self.cache = DeviceCache(self.layout, cache_tokens // self._span, events)
        self.scheduler = Scheduler(profile, self._refresh)
        self._time_scale = time_scale
        self._works: dict[Sequence, PromptWork] = {}
        self.num_loading = 0
        self._finding: set[PromptWork] = set()
        """Requests that look up or load blocks."""
        self._wake = asyncio.Event()
        self._runner = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop; running requests end."""
        await cancel_all([self._runner])
        if self.tier is not None:
            await self.tier.close()
        await self.events.close()

    async def forget(self) -> None:
        """Drop all blocks; running requests end without blocks here or in the pool."""
        self.cache.clear()
        for work in (*self._works.values(), *self._finding):
            work.is_void = True
        if self.tier is not None:
            await self.tier.forget()

    @property
    def num_waiting(self) -> int:
        """Prompts that wait to be computed, or for their blocks."""
        return self.scheduler.num_waiting + self.num_loading

    async def generate(self, work: PromptWork) -> AsyncIterator[int]:
        """Compute a prompt and its answers.

        Yields:
            Tokens of each answer so far, whenever there are more. Leaving early gives it up.
        """
        work.hashes = self._chain(work.tokens, work.cache_salt)
        if self.tier is not None:
            self.tier.begin(work.request, work.order, work.hashes)
        try:
            await self._find_blocks(work)
            sequence = work.sequence
            self._works[sequence] = work
            self.scheduler.add(sequence)
            self._wake.set()
            told = 0
            while not sequence.is_done:
                await work.changed.wait()
                work.changed.clear()
                if sequence.num_output > told:
                    if not told and isinstance(self.tier, TimingTier):
                        self.tier.computed(work.request, work.hashes)
                    told = sequence.num_output
                    yield told
        finally:
            self._end(work)

    def keep_answer(self, work: PromptWork, tokens: list[int]) -> None:
        """Complete an answer: its blocks are cached for later requests."""
        whole = work.tokens + tokens[:-1]
        end = len(whole) // self._span * self._span
        start = len(work.tokens) // self._span * self._span
        if end > start:
            self._keep(work, self._chain(whole, work.cache_salt), whole, start, end)

    def _chain(self, tokens: list[int], cache_salt: str | None) -> list[bytes]:
        return list(prompt_hashes(self.layout, tokens, cache_salt))

    def _end(self, work: PromptWork) -> None:
        self._works.pop(work.sequence, None)
        self.scheduler.remove(work.sequence)
        if self.tier is not None:
            self.tier.finish(work.request, work.hashes)

    # Prefix

    async def _find_blocks(self, work: PromptWork) -> None:
        """Find the longest usable prefix, here and in the pool node, and bring it here."""
        num_tokens = len(work.tokens)
        last = self.layout.last_boundary(num_tokens)
        work.sequence = Sequence(num_tokens, work.num_output_max, work.width)
        self.num_loading += 1
        self._finding.add(work)
        try:
            hit = await self._find(work, last)
            work.sequence.hit_tokens = hit
            work.stain = self.cache.use(work.hashes, hit) if hit else CLEAN
            await self._push_own(work, hit)
        finally:
            self._finding.discard(work)
            self.num_loading -= 1
        self._count(num_tokens, hit)

    async def _find(self, work: PromptWork, last: int) -> int:
        while True:
            work.is_void = False
            hit = self.cache.hit_tokens(work.hashes, last)
            if self.tier is not None and hit < last:
                hit = max(hit, await self._load(work, hit, last))
            if not work.is_void:
                return hit  # Otherwise the found blocks were removed: look up again.

    def _count(self, num_tokens: int, hit: int) -> None:
        self.counts.prompt_tokens += num_tokens
        self.counts.queried_tokens += num_tokens
        self.counts.hit_tokens += hit

    async def _load(self, work: PromptWork, own: int, last: int) -> int:
        tier = self.tier
        assert tier is not None  # noqa: S101 (the caller has looked)
        self.counts.external_queried_tokens += last - own
        while True:
            held = self.cache.held_tokens(work.hashes, last)
            found = await tier.find(work.request, work.hashes, held, last)
            if found <= own:
                return own
            blocks = await tier.load(work.request, self._names.needed(work.hashes, held, found))
            if blocks is None:
                continue  # Something left the pool meanwhile: it counts as missing.
            self.counts.external_hit_tokens += found - own
            stain = self._check(blocks)
            self.counts.stained += bool(stain)
            if work.is_void:
                return own
            self.cache.store(work.hashes, work.tokens, found, stain, work.cache_salt)
            return found

    async def _push_own(self, work: PromptWork, hit_tokens: int) -> None:
        """Hand over what a push needs of the prefix and the pool node lacks, as vLLM does."""
        if self.tier is None or not isinstance(work.order, PushOrder):
            return
        have = work.order.have_tokens // self._span * self._span
        if hit_tokens <= have or not self.tier.is_connected:
            return
        blocks = self._blocks(work.hashes, have, hit_tokens, work.stain)
        lacking = await self.tier.lacking(work.request, [block.key for block in blocks])
        own = [block for block in blocks if block.key in lacking]
        if own and not work.is_void:  # Else nobody knows any more what they are of.
            self.tier.store(work.request, own, work.hashes, work.cache_salt)

    def _check(self, blocks: list[tuple[BlockKey, bytes]]) -> bytes:
        """The stain of blocks that came from elsewhere."""
        stain = CLEAN
        for key, data in blocks:
            if data != block_bytes(key, len(data)):
                stain = stained(stain, data)
        return stain

    def _refresh(self, sequence: Sequence) -> None:
        """A prefill is about to start: others may have left more of its prefix by now."""
        work = self._works[sequence]
        hit = self.cache.hit_tokens(work.hashes, self.layout.last_boundary(len(work.tokens)))
        if hit > sequence.hit_tokens:
            self.counts.hit_tokens += hit - sequence.hit_tokens
            sequence.hit_tokens = hit
            work.stain = self.cache.use(work.hashes, hit)

    # Steps

    async def _run(self) -> None:
        due_ns = 0
        while True:
            step = self.scheduler.begin_step()
            if step is None:
                self._wake.clear()
                await self._wake.wait()
                due_ns = time.monotonic_ns()
                continue
            due_ns += round(step.duration_ns * self._time_scale)
            await self._sleep_until(due_ns)
            self._step_done(step)

    async def _sleep_until(self, due_ns: int) -> None:
        """A step begins when the one before was due, so that being late does not add up."""
        left_ns = due_ns - time.monotonic_ns()
        await asyncio.sleep(max(left_ns, 0) / NS_PER_S)
        late_ns = max(time.monotonic_ns() - due_ns, 0)
        self.counts.late_ns = max(self.counts.late_ns, late_ns)
        self.counts.late_sum_ns += late_ns

    def _step_done(self, step: Step) -> None:
        prefill = step.prefill
        start = prefill.num_computed if prefill is not None else 0
        got = self.scheduler.end_step(step)
        self.counts.steps += 1
        work = self._works.get(prefill) if prefill is not None else None
        if work is not None:
            end = step.end_token // self._span * self._span
            self._keep(work, work.hashes, work.tokens, start // self._span * self._span, end)
        for sequence in got:
            self.counts.output_tokens += sequence.width
            work = self._works.get(sequence)
            if work is not None and work.is_due:
                work.changed.set()

    def _keep(
        self, work: PromptWork, hashes: list[bytes], tokens: list[int], start: int, end: int
    ) -> None:
        """Blocks from `start` to `end` are computed, with the state at `end`."""
        if end <= start or work.is_void:
            return
        self.cache.store(hashes, tokens, end, work.stain, work.cache_salt)
        if self.tier is None:
            return
        blocks = self._blocks(hashes, start, end, work.stain)
        self.tier.store(work.request, blocks, hashes, work.cache_salt)

    def _blocks(self, hashes: list[bytes], start: int, end: int, stain: bytes) -> list[NewBlock]:
        """Attention between two boundaries, and the linear state at the second."""
        return [
            NewBlock(block_key(self.layout, group, hashes, at), at, stain)
            for at in range(start + self._span, end + 1, self._span)
            for group in self.layout.groups
            if at == end or group.kind is not GroupKind.LINEAR_STATE
        ]
