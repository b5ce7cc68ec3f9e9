"""Copies of hot prefixes that the PD cluster misses and a PrfaaS cluster holds, by pulls.

The core counts misses and chooses, as it does in the simulator. A copy serves whoever asks next: it
counts against the budget of the link, and against no tenant's share of it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import partial

from prfaas.config.routing import RoutingTable
from prfaas.core.control.changes import Loop
from prfaas.core.control.replication import CopiedPrompt, Copy, CopySettings, Replication
from prfaas.core.dispatch.links import LinkBook
from prfaas.core.dispatch.route_finder import Considered
from prfaas.core.dispatch.types import Arrival, Routed
from prfaas.core.kv.blocks import GroupKind, Layout
from prfaas.core.kv.shipping import shipped_bytes
from prfaas.core.transfer.tickets import Prefix
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.gateway.pools.prefix_fetch import Fetcher
from prfaas.gateway.routing.change_log import Journal
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.gateway.routing.transfer_tracker import Transfers, TransferView
from prfaas.wire.frames import TRANSFER_ID_BYTES

CANDIDATES_MAX = 256
"""Prefixes that are counted for each link; each keeps the hashes of a prompt."""
OPEN_MAX = 256
"""Copies under way at a time, all links together."""


@dataclass(slots=True)
class _Open:
    """A copy under way."""

    book: LinkBook
    num_bytes: int
    ends_at_ns: int


class PrefixReplication:
    """Counts misses that another pool would have served, and has the hot ones copied."""

    turns_each_beat = False

    def __init__(
        self,
        driver: Driver,
        transfers: Transfers,
        fetcher: Fetcher,
        settings: CopySettings,
        journal: Journal,
    ) -> None:
        self._driver, self._transfers, self._fetcher = driver, transfers, fetcher
        self._settings, self._journal = settings, journal
        self._hot = Replication[bytes](settings)
        self._open: dict[bytes, _Open] = {}

    @property
    def num_open(self) -> int:
        """Copies under way."""
        return len(self._open)

    def routed(self, arrival: Arrival, found: Routed, considered: Considered, now_ns: int) -> None:
        """A request was routed: count what it computes in the PD cluster and a PrfaaS pool has."""
        layout, hashes = arrival.layout, arrival.hashes
        if layout is None or not hashes:
            return
        for option in considered.missed(found):
            prompt = CopiedPrompt(
                Prefix(layout, hashes, arrival.tenant, arrival.quality),
                arrival.num_prompt_tokens,
                layout.boundary_tokens,
                any(group.kind is not GroupKind.FULL_ATTENTION for group in layout.groups),
                partial(_bytes_between, layout),
            )
            costs = option.cluster.costs
            assert costs is not None  # noqa: S101 (nothing is missed without)
            held_tokens = option.facts.pullable_tokens
            ends = option.pull_link.source, found.destination
            self._hot.missed(ends, prompt, found.present_tokens, held_tokens, costs, now_ns)

    # The loop

    def beat(self, now_ns: int) -> None:
        """Abort copies without a reported end."""
        for transfer_id, copy in list(self._open.items()):
            if now_ns >= copy.ends_at_ns:
                self._over(transfer_id)

    def turn(self, now_ns: int) -> None:
        """One interval has passed: start what is worth it."""
        for source, destination in self._hot.links:
            link = self._driver.dispatcher.links.between(source, destination)
            state = link.book.latest(now_ns) if link.up else None
            chosen = self._hot.choose((source, destination), state, link.ns_per_byte, now_ns)
            begun = [
                copy for copy in chosen if self._start(source, destination, copy, link.book, now_ns)
            ]
            if begun:
                self._note(source, destination, begun)

    def over(self, transfer: TransferView) -> None:
        """A transfer ended; it may have been a copy."""
        self._over(transfer.transfer_id)

    def _start(
        self, source: str, destination: str, copy: Copy[bytes], book: LinkBook, now_ns: int
    ) -> bool:
        prefix = copy.block_ids
        assert isinstance(prefix, Prefix)  # noqa: S101 (nothing else is counted)
        have_tokens = copy.num_present * prefix.layout.boundary_tokens
        if len(self._open) >= OPEN_MAX:
            return False
        transfer_id = secrets.token_bytes(TRANSFER_ID_BYTES)
        transfer = self._transfers.open(
            transfer_id, source, destination, partial(self._reported, transfer_id)
        )
        if self._fetcher.copy(transfer, prefix, have_tokens):
            return False
        book.promise(copy.num_bytes, now_ns)
        ends_at_ns = now_ns + self._fetcher.tickets.lifetime_ns
        self._open[transfer.transfer_id] = _Open(book, copy.num_bytes, ends_at_ns)
        return True

    def _reported(self, transfer_id: bytes, kind: TransferEnd | None, _: bool) -> None:
        if kind is not TransferEnd.COMMITTED:
            self._over(transfer_id)

    def _over(self, transfer_id: bytes) -> None:
        copy = self._open.pop(transfer_id, None)
        if copy is not None:
            copy.book.settle(copy.num_bytes)

    def _note(self, source: str, destination: str, begun: list[Copy[bytes]]) -> None:
        num_bytes = sum(copy.num_bytes for copy in begun)
        self._journal.note(
            Loop.REPLICATION,
            "copies",
            f"link {source}:{destination}",
            why="prefixes that the PD pool often misses are only in the other pool",
            numbers={
                "prefixes": len(begun),
                "bytes": num_bytes,
                "budget_bytes": self._settings.budget_bytes,
            },
        )


def _bytes_between(layout: Layout, final_tokens: int, have_tokens: int) -> int:
    return shipped_bytes(layout, have_tokens=have_tokens, final_tokens=final_tokens)


def copy_settings(routing: RoutingTable, interval_s: float) -> CopySettings:
    """Settings for copies, this number of bytes in each interval of the loop."""
    budget_bytes = round((routing.replication or 0) / 8 * interval_s)
    return CopySettings(
        budget_bytes, routing.replication_half_life, num_candidates_max=CANDIDATES_MAX
    )
