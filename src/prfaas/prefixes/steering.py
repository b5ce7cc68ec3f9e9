"""Orders of operators on the blocks of one recent prompt."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from aiohttp import web

from prfaas.core.control.changes import Loop, Number
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.errors import RequestError
from prfaas.gateway.api.operator_api import Name, json_body
from prfaas.gateway.http.responses import json_response
from prfaas.gateway.pools.transfer_orders import Fetcher
from prfaas.gateway.routing.transfer_tracker import Transfers
from prfaas.gateway.telemetry.live_parts import LiveParts
from prfaas.gateway.tenancy.tenants import Tenants
from prfaas.prefixes.copies import CopyOffer, CopyOffers, LinkCost
from prfaas.prefixes.pins import Pins, pins_json
from prfaas.purge.targets import Target
from prfaas.units import NS_PER_S
from prfaas.wire.frames import TRANSFER_ID_BYTES

PIN_S_MAX = 30 * 86_400.0


class PrefixBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /control/prefixes`: pin the blocks of a prompt for a time, or copy them to a pool."""

    request: Name
    pool: Annotated[str, msgspec.Meta(max_length=64)] = ""
    for_s: Annotated[float, msgspec.Meta(ge=0, le=PIN_S_MAX)] | None = None
    """Of a pin; None is a copy."""
    source: Annotated[str, msgspec.Meta(max_length=64)] = ""
    dry_run: bool = False


class Steering:
    """Pins and copies of recent prompts.

    Args:
        fetcher: Makes the copies, beside `transfers`, which follows them.
        tenants: Their tags.
    """

    def __init__(
        self, live: LiveParts, fetcher: Fetcher, transfers: Transfers, tenants: Tenants
    ) -> None:
        self._live, self._fetcher, self._transfers = live, fetcher, transfers
        self._names, self._tag_of = live.records.names, tenants.tag_of
        self.pins = Pins(live.pools)
        self._offers = CopyOffers(live.driver.index, live.pools, self._cost)

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the route."""
        router.add_post("/control/prefixes", self._ask)

    async def _ask(self, request: web.Request) -> web.Response:
        body = await json_body(request, PrefixBody)
        at, is_dry = (body.request, body.pool), body.dry_run
        if body.for_s is None:
            return json_response(await self.copy(*at, body.source, is_dry=is_dry))
        return json_response(await self.pin(*at, body.for_s, is_dry=is_dry))

    async def pin(self, request: str, pool: str, for_s: float, *, is_dry: bool) -> dict[str, Any]:
        """Pin the blocks of a prompt for a time, or count them.

        Args:
            request: Id of a recent request.
            pool: Name of a pool; empty for all.
            for_s: How long, seconds; 0 ends a pin.

        Raises:
            RequestError: There is no such request or pool, or there are too many pins.
        """
        recent = self._names.find(request)
        target = Target.of(recent, self._tag_of(recent.tenant))
        for_ns, now_ns = round(for_s * NS_PER_S), time.monotonic_ns()
        found = await self.pins.pin(target, pool, for_ns, now_ns, is_dry=is_dry)
        report = pins_json(target, for_s, found, is_dry=is_dry)
        numbers = {"blocks": report["num_blocks"], "bytes": report["num_bytes"], "for_s": for_s}
        action = "pin" if for_s else "unpin"
        return report | self._noted(action, target.request, numbers, is_dry=is_dry)

    async def copy(self, request: str, pool: str, source: str, *, is_dry: bool) -> dict[str, Any]:
        """Copy the blocks of a prompt to a pool, or show what that costs.

        Args:
            request: Id of a recent request.
            source: Pool to copy from; empty for the one that has the most of it.
            is_dry: Only show the cost.

        Raises:
            RequestError: There is no such request or pool, no link, or nothing to copy.
        """
        if not pool:
            raise RequestError("give the pool that the prompt is copied to")
        recent = self._names.find(request)
        offer = self._offers.find(recent, pool, source)
        problem = "" if is_dry else await self._move(offer)
        shown = {"request": recent.request, "dry_run": is_dry, "problem": problem}
        numbers = {"bytes": offer.num_bytes, "not_done": int(bool(problem))}
        noted = self._noted("copy", recent.request, numbers, is_dry=is_dry)
        return shown | offer.as_json() | noted

    def _noted(
        self, action: str, request: str, numbers: Mapping[str, Number], *, is_dry: bool
    ) -> dict[str, Any]:
        if is_dry:
            return {"decision": None}
        what, why = f"prompt of request {request}", "as the operator asked"
        entry = self._live.journal.note(Loop.OPERATOR, action, what, why=why, numbers=numbers)
        return {"decision": entry.as_json()}

    async def _move(self, offer: CopyOffer) -> str:
        over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def ended(kind: TransferEnd | None, at_destination: bool) -> None:
            is_done = kind is TransferEnd.COMMITTED
            if not over.done() and (at_destination or not is_done):
                over.set_result("" if is_done else "link_lost" if kind is None else kind.value)

        transfer_id = secrets.token_bytes(TRANSFER_ID_BYTES)
        view = self._transfers.open(transfer_id, offer.source, offer.destination, ended)
        book = self._live.driver.dispatcher.links.between(offer.source, offer.destination).book
        refused = self._fetcher.copy(view, offer.prefix, offer.have_tokens)
        if refused:
            return refused.value
        book.promise(offer.num_bytes, time.monotonic_ns())
        try:
            async with asyncio.timeout(self._fetcher.tickets.lifetime_ns / NS_PER_S):
                return await over
        except TimeoutError:
            self._live.pools.abort(view, "timeout")
            return "it did not end in time"
        finally:
            book.settle(offer.num_bytes)
            self._transfers.close(view)

    def _cost(self, source: str, destination: str) -> LinkCost:
        now_ns, dispatcher = time.monotonic_ns(), self._live.driver.dispatcher
        link = dispatcher.links.between(source, destination)
        state, market = link.book.latest(now_ns), dispatcher.market
        site = "" if link.is_in_site else dispatcher.links.cluster_of(source) or ""
        priced = None if market is None else market.quote(site, now_ns)
        return LinkCost(state.bits_per_s if state else 0.0, priced.per_byte if priced else None)
