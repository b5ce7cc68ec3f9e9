"""Hot prefixes are copied to pools that miss them: the core chooses, the links carry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from prfaas.core.control.replication import Copy, HotPrefixes, marks
from prfaas.core.dispatch.types import Routed
from prfaas.sim.engine.pool_caches import Hit
from prfaas.sim.system.request import Request

if TYPE_CHECKING:
    from prfaas.sim.engine.run_parts import RunParts


class Copier:
    """Counts misses that another pool would have served, and has the hot ones copied.

    Args:
        simulation: Whose pools and links.
    """

    def __init__(self, simulation: RunParts) -> None:
        self._sim, setup = simulation, simulation.setup
        copies = setup.placement.copies
        assert copies is not None  # noqa: S101 (there is a copier only then)
        self._home, self._blocks = setup.name, setup.blocks
        pairs = [p for c in setup.prfaas for p in ((c.name, self._home), (self._home, c.name))]
        self._hot: dict[tuple[str, str], HotPrefixes[int]] = {
            pair: HotPrefixes(copies) for pair in pairs
        }

    def note(self, request: Request, routed: Routed, hits: Mapping[str, Hit]) -> None:
        """A request is prefilled somewhere: count what other pools hold of it and this does not.

        What is pulled comes by itself.
        """
        if routed.pulls:
            return
        here, span = routed.cluster, self._blocks.tokens
        present = hits[here].num_tokens // span if here in hits else 0
        for source, there in hits.items():
            if (source, here) in self._hot:
                self._miss(request, (source, here), present, there.num_tokens // span)

    def _miss(self, request: Request, pair: tuple[str, str], present: int, held: int) -> None:
        lengths = list(marks(request.block_ids, present, held))
        if self._blocks.checkpoint_blocks:
            # Linear state lies only at the end of what the other pool can serve.
            lengths = lengths[-1:]
        for length in lengths:
            self._count(request, pair, present, length)

    def _count(self, request: Request, pair: tuple[str, str], present: int, length: int) -> None:
        cluster = pair[0] if pair[1] == self._home else pair[1]
        costs = self._sim.transports[cluster].cluster.costs
        span, prompt = self._blocks.tokens, request.num_prompt_tokens
        prefill_ns = costs.local_prefill_ns if pair[1] == self._home else costs.remote_prefill_ns
        saved_ns = prefill_ns(prompt - present * span) - prefill_ns(prompt - length * span)
        num_bytes = costs.shipped_bytes(length * span, present * span)
        self._hot[pair].miss(
            request.block_ids,
            length,
            present,
            num_bytes=num_bytes,
            saved_ns=saved_ns,
            now_ns=self._sim.clock.now_ns,
        )

    def tick(self) -> None:
        """One interval has passed: start what is worth it."""
        now_ns = self._sim.clock.now_ns
        for (source, destination), hot in self._hot.items():
            link = self._sim.front.link(source, destination)
            if link.up:
                worth = self._ns_per_byte(source, destination)
                for copy in hot.choose(link.book.latest(now_ns), now_ns, worth):
                    self._start(source, destination, copy)

    def _ns_per_byte(self, source: str, destination: str) -> float:
        """Worth of a byte on a link, as time."""
        cluster = source if destination == self._home else destination
        price = self._sim.transports[cluster].cluster.link.price_per_tb
        return self._sim.front.settings.ns_per_byte(price)

    def _start(self, source: str, destination: str, copy: Copy[int]) -> None:
        home = destination == self._home
        book = self._sim.front.link(source, destination).book
        pool = self._sim.front.caches.pools[destination]

        def ended(landed: bool) -> None:
            book.settle(copy.num_bytes)
            # What was there when the copy was chosen may have been evicted meanwhile.
            if landed and pool.num_held(copy.block_ids) >= copy.num_present:
                pool.store(copy.block_ids)

        book.promise(copy.num_bytes, self._sim.clock.now_ns)
        transport = self._sim.transports[source if home else destination]
        transport.copy(copy.num_bytes, home=home, ended=ended)
