"""Transfers of one request: opened, aborted and released with the pools at both ends."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from prfaas.core.kv.blocks import Layout
from prfaas.core.kv.shipping import shipped_bytes
from prfaas.core.request.events import AnyEvent, Blocks, PoolLost, TransferEnded
from prfaas.core.transfer.tickets import Prefix
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.gateway.pools.pool_client import Pools
from prfaas.gateway.pools.prefix_fetch import Fetcher, NotAsked
from prfaas.gateway.routing.transfer_tracker import Transfers, TransferView
from prfaas.gateway.serving.request_state import Exchange
from prfaas.gateway.serving.routing_step import RoutedPrompt
from prfaas.wire.frames import TRANSFER_ID_BYTES
from prfaas.wire.messages.link import Ahead, all_computed


@dataclass(frozen=True, slots=True)
class Movers:
    """Services that move blocks for all requests."""

    pools: Pools
    transfers: Transfers
    fetcher: Fetcher


class MovingBlocks:
    """The transfers of one request."""

    def __init__(
        self, movers: Movers, exchange: Exchange, report: Callable[[AnyEvent], None]
    ) -> None:
        self._movers, self._exchange, self._report = movers, exchange, report
        self._views: dict[Blocks, TransferView] = {}
        self.all: list[tuple[Blocks, TransferView]] = []
        """All transfers that were begun, those of prefills that were given up included."""
        self._whole_bytes = 0
        """Bytes of all blocks of the hand-off; 0 if unknown."""

    def get(self, blocks: Blocks | None) -> TransferView | None:
        """Transfer of some blocks; None without one."""
        return None if blocks is None else self._views.get(blocks)

    def open(self, blocks: Blocks, source: str, destination: str) -> TransferView:
        """Begin a transfer, or a hand-over within a pool, of which no pool reports an end."""
        transfer_id = secrets.token_bytes(TRANSFER_ID_BYTES)
        if blocks in self._views:
            # Of a prefill that was given up.
            self._movers.transfers.close(self._views[blocks])
        report = partial(self._ended, blocks)
        view = self._movers.transfers.open(transfer_id, source, destination, report)
        self._views[blocks] = view
        self.all.append((blocks, view))
        if not view.stays:
            record = self._exchange.record
            record.ships_by(view)
            view.trace = self._exchange.trace.of_transfer(record)
            view.service = record.service
        return view

    def charge(self, plan: RoutedPrompt, layout: Layout | None, final_tokens: int) -> None:
        """Charge blocks of a prefix that come from a PrfaaS cluster on their tenant's limit."""
        if layout is not None:
            have = plan.routed.present_tokens
            num_bytes = shipped_bytes(layout, have_tokens=have, final_tokens=final_tokens)
            self._exchange.record.allowed(num_bytes)
            self._exchange.tenant.quota.ship(num_bytes, time.monotonic_ns())

    def fetch(self, plan: RoutedPrompt) -> bool:
        """Have the prefix fetched that a route counts on; False if its pool cannot be asked."""
        routed, layout = plan.routed, plan.layout
        assert layout is not None  # noqa: S101 (nothing is pulled without one)
        hashes = plan.arrival.hashes[: routed.hit_tokens // layout.tokens_per_hash]
        view = self.open(Blocks.PULL, *routed.pull_link)
        prefix = Prefix(layout, hashes, plan.arrival.tenant, plan.arrival.quality)
        is_asked = not self._movers.fetcher.fetch(view, prefix, routed.prefill_pool_tokens)
        if not is_asked:
            del self._views[Blocks.PULL]
        return is_asked

    def expect(self, plan: RoutedPrompt) -> None:
        """Note which blocks a hand-off has to bring, those of further checkpoints not counted."""
        have, final = plan.routed.present_tokens, plan.route.final_tokens
        if plan.layout is not None:
            self._whole_bytes = shipped_bytes(plan.layout, have_tokens=have, final_tokens=final)

    def follow(self, plan: RoutedPrompt, view: TransferView) -> NotAsked | None:
        """Have the blocks of a hand-off fetched as an engine without orders stores them.

        Returns:
            Reason why they cannot be; None if they are.
        """
        layout = plan.layout
        assert layout is not None  # noqa: S101 (it is what takes no orders)
        if view.stays:
            return None
        hashes = plan.arrival.hashes[: plan.route.final_tokens // layout.tokens_per_hash]
        prefix = Prefix(layout, hashes, plan.arrival.tenant, plan.arrival.quality)
        have_tokens = plan.routed.present_tokens
        return self._movers.fetcher.fetch(view, prefix, have_tokens, Ahead.COMPUTING)

    def computed(self, blocks: Blocks) -> None:
        """Report that the engine has answered whose blocks are followed."""
        if (view := self._views.get(blocks)) is not None and blocks is Blocks.HAND_OFF:
            self._movers.pools.send(view.destination, all_computed(view.transfer_id, view.source))

    def abort(self, blocks: Blocks, why: str) -> None:
        """End a transfer at both pools; nothing happens if it has not begun."""
        if blocks in self._views:
            self._views[blocks].is_given_up = True
            self._movers.pools.abort(self._views[blocks], why)

    def release(self, blocks: Blocks) -> None:
        """Report that no request waits for these blocks any more."""
        if blocks in self._views:
            self._movers.pools.release(self._views[blocks])

    def close(self) -> None:
        """The request is over: nothing of it is kept by its transfers, which are remembered."""
        self._report = lambda _: None
        for view in self._views.values():
            self._movers.transfers.close(view)

    def _ended(self, blocks: Blocks, kind: TransferEnd | None, at_destination: bool) -> None:
        if kind is None:
            self._report(PoolLost(blocks))
        else:
            num_bytes = self._views[blocks].num_bytes if at_destination else 0
            is_whole = kind is TransferEnd.COMMITTED and 0 < self._whole_bytes <= num_bytes
            is_whole = is_whole and blocks is Blocks.HAND_OFF
            self._report(TransferEnded(blocks, kind, at_destination, num_bytes, is_whole))
