"""Hot prefixes that the home cluster misses and a PrfaaS cluster holds: copied by pulls.

The core counts misses and chooses, as it does in the simulator. A copy serves whoever asks next: it
counts against the budget of the link, and against no tenant's share of it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import partial

from prfaas.core.control.replication import Copy, CopySettings, HotPrefixes, marks
from prfaas.core.dispatch.link_load import LinkBook
from prfaas.core.dispatch.route_options import Considered, RouteOption
from prfaas.core.dispatch.types import Arrival, Routed
from prfaas.core.kv.blocks import GroupKind
from prfaas.core.kv.shipping import shipped_bytes
from prfaas.core.routing.decision import Path
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.gateway.pools.prefix_fetch import Fetcher, Prefix
from prfaas.gateway.routing.change_log import Journal, Loop
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.gateway.routing.pool_state import LinkName
from prfaas.gateway.routing.transfer_tracker import Transfers, TransferView
from prfaas.units import NS_PER_S
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


class Copier:
    """Counts misses that another pool would have served, and has the hot ones copied.

    Args:
        driver: Knows the links.
        transfers: Follow the copies.
        fetcher: Asks pools for them.
        settings: Budget of a link in one interval, and decay.
        journal: Hears what was copied.
    """

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
        self._hot: dict[LinkName, HotPrefixes[bytes]] = {}
        self._open: dict[bytes, _Open] = {}

    @property
    def num_open(self) -> int:
        """Copies under way."""
        return len(self._open)

    def routed(self, arrival: Arrival, found: Routed, considered: Considered, now_ns: int) -> None:
        """A request is prefilled at home: count what PrfaaS clusters hold of it and home does not.

        What is prefilled away comes home by itself, and so does what is pulled.
        """
        if found.decision.path is not Path.LOCAL or found.pulls:
            return
        if arrival.layout is None or not arrival.hashes:
            return
        for option in considered.options:
            held = option.facts.pullable_tokens > found.present_tokens
            if (
                held
                and option.link.destination == found.destination
                and option.cluster.costs is not None
            ):
                prefix = Prefix(arrival.layout, arrival.hashes, arrival.tenant)
                self._miss(option, prefix, arrival.num_prompt_tokens, found.present_tokens, now_ns)

    def _miss(
        self,
        option: RouteOption,
        prefix: Prefix,
        num_prompt_tokens: int,
        present_tokens: int,
        now_ns: int,
    ) -> None:
        layout, span = prefix.layout, prefix.layout.boundary_tokens
        present, held = present_tokens // span, option.facts.pullable_tokens // span
        lengths = list(marks(prefix, present, held))
        if any(group.kind is not GroupKind.FULL_ATTENTION for group in layout.groups):
            # State lies only at the end of what the other pool can serve.
            lengths = lengths[-1:]
        link = (option.link.source, option.link.destination)
        if link not in self._hot:
            self._hot[link] = HotPrefixes(self._settings)
        costs = option.cluster.costs
        assert costs is not None  # noqa: S101 (asked before)
        for length in lengths:
            saved_ns = costs.local_prefill_ns(num_prompt_tokens - present_tokens)
            saved_ns -= costs.local_prefill_ns(num_prompt_tokens - length * span)
            self._hot[link].miss(
                prefix[:length],
                length,
                present,
                num_bytes=shipped_bytes(
                    layout, have_tokens=present * span, final_tokens=length * span
                ),
                saved_ns=saved_ns,
                now_ns=now_ns,
            )

    # The loop

    def beat(self, now_ns: int) -> None:
        """Give up what nobody has told the end of."""
        for transfer_id, copy in list(self._open.items()):
            if now_ns >= copy.ends_at_ns:
                self._over(transfer_id)

    def turn(self, now_ns: int) -> None:
        """One interval has passed: start what is worth it."""
        for (source, destination), hot in self._hot.items():
            link = self._driver.dispatcher.links.between(source, destination)
            seen = link.book.latest(now_ns)
            if seen is None or not link.up:
                continue
            begun = [
                copy
                for copy in hot.choose(seen, now_ns)
                if self._start(source, destination, copy, link.book, now_ns)
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
        if not self._fetcher.fetch(transfer, prefix, have_tokens):
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
            why="prefixes that are asked for again and again at home lie only in the other pool",
            numbers={
                "prefixes": len(begun),
                "bytes": num_bytes,
                "budget_bytes": self._settings.budget_bytes,
            },
        )


def copy_settings(bits_per_s: int, interval_s: float) -> CopySettings:
    """Settings for copies that take so much of each link.

    Args:
        bits_per_s: Of a link, on average.
        interval_s: Of the loop.
    """
    budget_bytes = round(bits_per_s / 8 * interval_s)
    return CopySettings(budget_bytes, 60 * NS_PER_S, num_candidates_max=CANDIDATES_MAX)
