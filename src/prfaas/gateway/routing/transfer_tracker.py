"""Transfers of recent requests, as their two pools report them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prfaas.core.facts import FactStream
from prfaas.core.kv.blocks import Layout
from prfaas.core.transfer.transfer_state import LINK_FAULTS, TransferEnd
from prfaas.wire.messages.gateway import TransferEnded
from prfaas.wire.messages.link import Refused

OPEN = "open"
"""A transfer of which no pool has reported the end."""
VIEWS_MAX = 4096
"""Transfers that are remembered; more than ever run at once, and late events find the others."""

Report = Callable[[TransferEnd | None, bool], None]
"""Callback with a reported end, and if the pool is the destination; None for a broken event stream.
"""


@dataclass(slots=True)
class TransferView:
    """State of one transfer."""

    transfer_id: bytes
    """16 bytes."""
    source: str
    destination: str
    report: Report = lambda *_: None
    trace: str = ""
    """W3C context for what its pools do; empty if nobody records it."""
    service: str = ""
    """Class of service of its request; empty without."""
    ended: dict[str, TransferEnded] = field(default_factory=dict)
    """How it ended, by pool."""
    is_judged: bool = False
    """True if its link was judged by its end."""
    is_given_up: bool = False
    """True if its request gave it up."""

    @property
    def arrival(self) -> TransferEnded | None:
        """The destination's report of its end; None while there is none."""
        return self.ended.get(self.destination)

    @property
    def stays(self) -> bool:
        """Return True if one engine hands its blocks to another of the same pool: nothing crosses a
        link, and no pool reports an end."""
        return self.source == self.destination

    @property
    def num_bytes(self) -> int:
        """Payload bytes moved: as they arrived, or as they were sent if that is all we know."""
        event = self.best_event
        return event.num_bytes if event else 0

    @property
    def duration_ns(self) -> int:
        """Time from its opening to its last block; 0 while unknown."""
        event = self.best_event
        return max(0, event.duration_ns - event.last_block_age_ns) if event else 0

    @property
    def state(self) -> str:
        """Reported state; open until a report arrives, possibly after the request's end."""
        event = self.best_event
        return event.state if event else OPEN

    @property
    def best_event(self) -> TransferEnded | None:
        """The destination's report, else the source's."""
        return self.ended.get(self.destination) or self.ended.get(self.source)


@dataclass(frozen=True, slots=True)
class TransferArrived:
    """A fact: the destination of a transfer has reported its end; once a transfer."""

    view: TransferView


@dataclass(frozen=True, slots=True)
class TransferJudged:
    """A fact: the end by which a link is judged is known; once a transfer."""

    view: TransferView
    end: TransferEnd
    """The first fault that a pool reports, or else the destination's end."""


@dataclass(frozen=True, slots=True)
class BlocksReceived:
    """A fact: a request has ended, and may have used blocks of another cluster."""

    pool: str
    """Of the engine that decoded."""
    transfers: Sequence[TransferView]
    """Those of the request that crossed to it, however they ended."""
    engine: str
    layout: Layout
    """Of the blocks, with the checkpoints that a transfer may have shipped."""
    token_ids: Sequence[int]
    """The prompt. Never logged."""
    hashes: Sequence[bytes]
    """Hash chain of the prompt."""
    cache_salt: str
    """Salt of the chain. Never logged."""
    present_tokens: int
    """Prefix that the pool had."""
    final_tokens: int
    """End of the received prefix."""
    is_lossy: bool
    """True if the blocks were rounded."""


class Transfers:
    """Views by transfer id, the oldest forgotten first."""

    def __init__(self, facts: FactStream | None = None) -> None:
        self._facts = facts or FactStream()
        self._views: OrderedDict[bytes, TransferView] = OrderedDict()

    def open(
        self, transfer_id: bytes, source: str, destination: str, report: Report = lambda *_: None
    ) -> TransferView:
        """Begin to follow a transfer."""
        view = TransferView(transfer_id, source, destination, report)
        self._views[transfer_id] = view
        while len(self._views) > VIEWS_MAX:
            self._views.popitem(last=False)
        return view

    def close(self, view: TransferView) -> None:
        """Its request is over: ends are still noted, and reported to nobody."""
        view.report = lambda *_: None

    def ended(self, pool: str, event: TransferEnded) -> None:
        """`pool` reports an end. Transfers of others and repetitions change nothing."""
        view = self._views.get(event.transfer_id)
        if view is None or pool in view.ended or pool not in (view.source, view.destination):
            return
        view.ended[pool] = event
        at_destination = pool == view.destination
        if at_destination or event.kind in LINK_FAULTS:
            self._judge(view, event.kind)
        view.report(event.kind, at_destination)
        if at_destination:
            self._facts.report(TransferArrived(view))

    def refused(self, pool: str, message: Refused) -> None:
        """Handle a pool's refusal of a pull, which has no other end."""
        view = self._views.get(message.transfer_id)
        if view is not None and pool == view.destination:
            self._judge(view, TransferEnd.REFUSED)
            view.report(TransferEnd.REFUSED, False)

    def lost(self, pool: str) -> None:
        """The event stream of `pool` broke: what runs over it cannot be followed any more."""
        for view in list(self._views.values()):
            if pool in (view.source, view.destination) and pool not in view.ended:
                view.report(None, pool == view.destination)

    def _judge(self, view: TransferView, end: TransferEnd) -> None:
        if not view.is_judged:
            view.is_judged = True
            self._facts.report(TransferJudged(view, end))
