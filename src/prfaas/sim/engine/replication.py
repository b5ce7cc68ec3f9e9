"""Copies of hot prefixes to the PD cluster's pool: the core counts and chooses, links carry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prfaas.core.control.replication import CopiedPrompt, Copy, Replication
from prfaas.core.dispatch.links import Link
from prfaas.core.dispatch.route_finder import Considered
from prfaas.core.dispatch.types import Routed
from prfaas.sim.system.request import Request

if TYPE_CHECKING:
    from prfaas.sim.engine.request_run import RunParts


class SimulatedReplication:
    """Copies prefixes that the PD cluster often misses."""

    def __init__(self, simulation: RunParts) -> None:
        self._sim, setup = simulation, simulation.setup
        assert setup.placement.copies is not None  # noqa: S101 (there is a copier only then)
        self._blocks, self._hot = setup.blocks, Replication[int](setup.placement.copies)

    def routed(self, request: Request, found: Routed, considered: Considered) -> None:
        """A request was routed: count what it computes in the PD cluster and a PrfaaS pool has."""
        for option in considered.missed(found):
            ends = option.pull_link.source, found.destination
            costs = self._sim.transports[ends].costs
            prompt = CopiedPrompt(
                request.block_ids,
                request.num_prompt_tokens,
                self._blocks.tokens,
                self._blocks.checkpoint_blocks > 0,
                costs.shipped_bytes,
            )
            held_tokens, now_ns = option.facts.pullable_tokens, self._sim.clock.now_ns
            self._hot.missed(ends, prompt, found.present_tokens, held_tokens, costs, now_ns)

    def tick(self) -> None:
        """One interval has passed: start what is worth it."""
        now_ns = self._sim.clock.now_ns
        for source, destination in self._hot.links:
            link = self._sim.front.dispatcher.links.between(source, destination)
            state = link.book.latest(now_ns) if link.up else None
            for copy in self._hot.choose((source, destination), state, link.ns_per_byte, now_ns):
                self._start(link, copy)

    def _start(self, link: Link, copy: Copy[int]) -> None:
        pool = self._sim.front.caches.pools[link.destination]

        def ended(landed: bool) -> None:
            link.book.settle(copy.num_bytes)
            # What was there when the copy was chosen may have been evicted meanwhile.
            if landed and pool.num_held(copy.block_ids) >= copy.num_present:
                pool.store(copy.block_ids)

        link.book.promise(copy.num_bytes, self._sim.clock.now_ns)
        ends = link.source, link.destination
        self._sim.transports[ends].copy(copy.num_bytes, ended)
