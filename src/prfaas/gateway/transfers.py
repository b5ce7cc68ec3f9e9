"""Transfers of recent requests, as their two pools report them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from prfaas.core.transfers import LINK_FAULTS, TransferEnd
from prfaas.wire.messages.gateway import TransferEnded
from prfaas.wire.messages.link import Refused

OPEN = "open"
"""A transfer of which no pool has reported the end."""
VIEWS_MAX = 4096
"""Transfers that are remembered; more than ever run at once, and late events find the others."""

LATE = "late"
"""The gateway left the remote path, because the local one is going to be sooner."""
STALLED = "stalled"
"""The gateway left a prefill that took many times as long as such prefills do."""
UNKNOWN = "unknown"
"""Blocks are missing though their transfer ended well."""


@dataclass(slots=True)
class TransferView:
    """What the gateway knows of one transfer.

    Attributes:
        transfer_id: 16 bytes.
        source: Pool that sends.
        destination: Pool that receives.
        number: The driver's number of its request.
        trace: W3C context for what its pools do; empty if nobody records it.
        broken: Resolves with a reason once the transfer can not complete any more.
        ended: How it ended, by pool.
        lost_pools: Pools whose event stream broke since it began.
        is_judged: Whether its link was judged by its end.
    """

    transfer_id: bytes
    source: str
    destination: str
    number: int
    broken: asyncio.Future[str]
    trace: str = ""
    ended: dict[str, TransferEnded] = field(default_factory=dict)
    lost_pools: set[str] = field(default_factory=set)
    is_judged: bool = False

    @property
    def stays(self) -> bool:
        """Whether one engine hands its blocks to another of the same pool: nothing crosses a link,
        and no pool reports an end."""
        return self.source == self.destination

    @property
    def num_bytes(self) -> int:
        """Payload bytes moved: as they arrived, or as they were sent if that is all we know."""
        event = self.best_event
        return event.num_bytes if event else 0

    @property
    def duration_ns(self) -> int:
        """From its opening to its last block; 0 while unknown."""
        event = self.best_event
        return max(0, event.duration_ns - event.last_block_age_ns) if event else 0

    @property
    def state(self) -> str:
        """As reported; open until a report comes, which may be after the request's end."""
        event = self.best_event
        return event.state if event else OPEN

    @property
    def best_event(self) -> TransferEnded | None:
        """The destination's report, else the source's."""
        return self.ended.get(self.destination) or self.ended.get(self.source)

    @property
    def has_arrived(self) -> bool:
        """Whether its destination has told its end, good or bad."""
        return self.destination in self.ended

    @property
    def is_complete(self) -> bool:
        """Whether its destination has told that all of it is there."""
        event = self.ended.get(self.destination)
        return event is not None and event.kind is TransferEnd.COMMITTED

    @property
    def failure(self) -> str:
        """Why blocks are missing: one of a bounded set, for metrics."""
        for pool in (self.destination, self.source):
            event = self.ended.get(pool)
            if event is not None and event.kind is not TransferEnd.COMMITTED:
                return event.kind
        if self.lost_pools:
            return "pool_down"
        return UNKNOWN if self.has_arrived or self.stays else "timeout"

    def break_with(self, reason: str) -> None:
        """The transfer can not complete."""
        if not self.broken.done():
            self.broken.set_result(reason)


@dataclass(slots=True)
class PrefixPull:
    """A prefix that one request has fetched for its prefill at home.

    Attributes:
        transfer: Its blocks.
        home_tokens: Prefix that is there without it.
        hit_tokens: Prefix that is there with all of it.
        outcome: What came of it, one of a bounded set; empty while its engine may wait for it.
    """

    transfer: TransferView
    home_tokens: int
    hit_tokens: int
    outcome: str = ""
    _stops: list[Callable[[], object]] = field(default_factory=list)

    def watch(
        self,
        on_broken: Callable[[asyncio.Future[str]], None],
        hedge: asyncio.Task[None] | None,
        timeout_s: float,
        reason: str,
    ) -> None:
        """Look after it until its engine has begun to answer.

        Args:
            on_broken: Called once it can not complete, or not in time.
            hedge: Breaks it when computing it is sooner; None where nothing is predicted.
            timeout_s: From now until it is broken.
            reason: Why it is broken then.
        """
        broken, loop = self.transfer.broken, asyncio.get_running_loop()
        timer = loop.call_later(timeout_s, self.transfer.break_with, reason)
        broken.add_done_callback(on_broken)
        self._stops = [timer.cancel, partial(broken.remove_done_callback, on_broken)]
        if hedge is not None:
            self._stops.append(hedge.cancel)

    def stop(self) -> None:
        """Its engine has begun to answer, or nobody waits for it any more."""
        for stop in self._stops:
            stop()
        self._stops = []

    def end(self, outcome: str) -> None:
        """It is known what came of it."""
        self.outcome = outcome
        self.stop()

    def num_of_use(self, cached_tokens: int) -> int:
        """How much of it an engine used that found so many tokens."""
        return max(0, min(cached_tokens, self.hit_tokens) - self.home_tokens)


class Transfers:
    """Views by transfer id, the oldest forgotten first.

    Args:
        on_arrived: Called once a transfer, when its destination reported its end.
        on_judged: Called once a transfer with the end that its link is judged by: the first fault
            that a pool reports, or else the destination's end.
    """

    def __init__(
        self,
        on_arrived: Callable[[TransferView], None] = lambda _: None,
        on_judged: Callable[[TransferView, TransferEnd], None] = lambda *_: None,
    ) -> None:
        self._on_arrived, self._on_judged = on_arrived, on_judged
        self._views: OrderedDict[bytes, TransferView] = OrderedDict()

    def open(self, transfer_id: bytes, source: str, destination: str, number: int) -> TransferView:
        """Begin to follow a transfer."""
        broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        view = TransferView(transfer_id, source, destination, number, broken)
        self._views[transfer_id] = view
        while len(self._views) > VIEWS_MAX:
            self._views.popitem(last=False)
        return view

    def ended(self, pool: str, event: TransferEnded) -> None:
        """`pool` reports an end. Transfers of others and repetitions change nothing."""
        view = self._views.get(event.transfer_id)
        if view is None or pool in view.ended or pool not in (view.source, view.destination):
            return
        view.ended[pool] = event
        if event.kind is not TransferEnd.COMMITTED:
            view.break_with(event.kind)
        if not view.is_judged and (pool == view.destination or event.kind in LINK_FAULTS):
            view.is_judged = True
            self._on_judged(view, event.kind)
        if pool == view.destination:
            self._on_arrived(view)

    def refused(self, pool: str, message: Refused) -> None:
        """A pool will not fetch what it was asked to pull; no end of it is told."""
        view = self._views.get(message.transfer_id)
        if view is not None and pool == view.destination:
            view.break_with("refused")

    def lost(self, pool: str) -> None:
        """The event stream of `pool` broke: what runs over it can not be followed any more."""
        for view in self._views.values():
            if pool in (view.source, view.destination) and pool not in view.ended:
                view.lost_pools.add(pool)
                view.break_with("pool_down")
