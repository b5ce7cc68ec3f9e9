"""Copies, costs and records of operators' orders on prompts (`prfaas/prefixes`)."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass

from prfaas.core.control.changes import ChangeEntry, Loop, Number
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.gateway.pools.transfer_orders import Fetcher
from prfaas.gateway.routing.transfer_tracker import Transfers
from prfaas.gateway.telemetry.live_parts import LiveParts
from prfaas.gateway.tenancy.tenants import Tenants
from prfaas.prefixes.copies import CopyOffer, CopyOffers, LinkCost
from prfaas.prefixes.pins import Pins
from prfaas.prefixes.steering import Steering
from prfaas.units import NS_PER_S
from prfaas.wire.frames import TRANSFER_ID_BYTES


def make_steering(
    live: LiveParts, fetcher: Fetcher, transfers: Transfers, tenants: Tenants
) -> Steering:
    """Return the orders of a gateway."""
    hand = _Hand(live, fetcher, transfers)
    offers = CopyOffers(live.index, live.pools, hand.cost)
    names, clock_ns = live.records.names, time.monotonic_ns
    return Steering(names, tenants.tag_of, Pins(live.pools), offers, hand.move, hand.note, clock_ns)


@dataclass(frozen=True, slots=True)
class _Hand:
    live: LiveParts
    fetcher: Fetcher
    transfers: Transfers

    async def move(self, offer: CopyOffer) -> str:
        over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def ended(kind: TransferEnd | None, at_destination: bool) -> None:
            is_done = kind is TransferEnd.COMMITTED
            if not over.done() and (at_destination or not is_done):
                over.set_result("" if is_done else "link_lost" if kind is None else kind.value)

        transfer_id = secrets.token_bytes(TRANSFER_ID_BYTES)
        view = self.transfers.open(transfer_id, offer.source, offer.destination, ended)
        book = self.live.driver.dispatcher.links.between(offer.source, offer.destination).book
        refused = self.fetcher.copy(view, offer.prefix, offer.have_tokens)
        if refused:
            return refused.value
        book.promise(offer.num_bytes, time.monotonic_ns())
        try:
            async with asyncio.timeout(self.fetcher.tickets.lifetime_ns / NS_PER_S):
                return await over
        except TimeoutError:
            self.live.pools.abort(view, "timeout")
            return "it did not end in time"
        finally:
            book.settle(offer.num_bytes)
            self.transfers.close(view)

    def cost(self, source: str, destination: str) -> LinkCost:
        now_ns, dispatcher = time.monotonic_ns(), self.live.driver.dispatcher
        link = dispatcher.links.between(source, destination)
        state, market = link.book.latest(now_ns), dispatcher.market
        site = "" if link.is_in_site else dispatcher.links.cluster_of(source) or ""
        priced = None if market is None else market.quote(site, now_ns)
        return LinkCost(state.bits_per_s if state else 0.0, priced.per_byte if priced else None)

    def note(self, action: str, what: str, numbers: Mapping[str, Number]) -> ChangeEntry:
        why = "as the operator asked"
        return self.live.journal.note(Loop.OPERATOR, action, what, why=why, numbers=numbers)
