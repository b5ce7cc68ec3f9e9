"""The link between two pools, and what is in transit over it.

Hand-offs go chunk by chunk as they are computed. Prefixes that are pulled for a prefill, and copies
of hot ones, go whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prfaas.core.routing.predictions import Costs
from prfaas.sim.resources.coded_link import make_link
from prfaas.sim.resources.shared_link import Flow, Purpose
from prfaas.sim.system.clock import Clock
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import LinkSetup


@dataclass(slots=True)
class _Transfer:
    """Blocks of one request. `present_tokens` of its prompt are at the destination already.

    Of the first tokens of the prompt, all KV bytes but `kept_bytes` may leave once they are
    computed: what is present stays, and the linear state comes with the last chunk.
    """

    shipped_bytes: int
    present_tokens: int
    kept_bytes: int = 0
    flow: Flow | None = None


Ended = Callable[[bool], None]
"""Called with True if a copy has landed, False if it was lost."""


class Transport:
    """One direction of a link.

    Args:
        ends: Pools that send and receive.
        costs: Bytes of prompts.
        on_landed: Called when all blocks of a hand-off have arrived.
        on_pulled: A prefix that a request waits for has arrived.
        on_change: The link was found dead (False) or alive (True).
        told_after_ns: From the link's recovery, or a pool's failure, until it is known.
    """

    def __init__(
        self,
        clock: Clock,
        ends: tuple[str, str],
        setup: LinkSetup,
        costs: Costs,
        *,
        on_landed: Callable[[Request, Transport], None],
        on_pulled: Callable[[Request, Transport], None],
        on_change: Callable[[Transport, bool], None],
        told_after_ns: int,
    ) -> None:
        self.ends, self.setup, self.costs = ends, setup, costs
        self._clock = clock
        self._on_landed, self._on_pulled, self._on_change = on_landed, on_pulled, on_change
        self._told_after_ns = told_after_ns
        self._taken_for_alive = True
        self.changed_at_ns = 0
        self._capacity_ratio, self._num_pools_down = 1.0, 0
        self._open: dict[Request, _Transfer] = {}
        self._copies: dict[Flow, Ended] = {}
        self.link = make_link(clock, setup, costs.state_bytes, self._landed)

    # Hand-offs

    def promise(self, request: Request, shipped_bytes: int, present_tokens: int) -> None:
        """A transfer was decided; its bytes come once prefill starts."""
        costs = self.costs
        kept = costs.sent_bytes(present_tokens) if present_tokens else costs.state_bytes
        self._open[request] = _Transfer(shipped_bytes, present_tokens, kept)

    def start(self, request: Request) -> None:
        """The prefill of a promised transfer starts."""
        transfer = self._open[request]
        transfer.flow = self.link.open(request, transfer.shipped_bytes)

    def chunk(self, request: Request, tokens: int) -> None:
        """The first `tokens` new tokens of a prompt are computed: ship what belongs to them."""
        transfer = self._open.get(request)
        if transfer is None or transfer.flow is None:
            return
        flow, left_tokens = transfer.flow, request.num_new_tokens - tokens
        if not left_tokens:
            added_bytes = transfer.shipped_bytes - flow.added_bytes
            self.link.add(flow, added_bytes if added_bytes > 0 else 0, last=True)
            return
        ready_bytes = self.costs.sent_bytes(request.num_prompt_tokens - left_tokens)
        added_bytes = ready_bytes - transfer.kept_bytes - flow.added_bytes
        if added_bytes > 0:
            self.link.add(flow, added_bytes, last=False)

    # Prefixes

    def pull(self, request: Request, num_bytes: int, present_tokens: int) -> None:
        """Ask for a prefix; it leaves when the question has crossed the link."""
        flow = self.link.open(request, num_bytes, Purpose.PULL)
        self._open[request] = _Transfer(num_bytes, present_tokens, flow=flow)
        self._clock.after(self.setup.rtt_ns // 2, self._answer, flow)

    def _answer(self, flow: Flow) -> None:
        self.link.add(flow, flow.promised_bytes, last=True)

    def copy(self, num_bytes: int, ended: Ended) -> None:
        """Copy blocks."""
        flow = self.link.open(None, num_bytes, Purpose.COPY)
        self._copies[flow] = ended
        self.link.add(flow, num_bytes, last=True)

    # Endings

    def arrived_tokens(self, request: Request) -> int:
        """Usable leading tokens of a prompt at the destination, earlier ones included.

        Attention blocks are of use one by one; a model with linear state can resume only at a
        state, of which the last comes at the end, and others if checkpoints are shipped.
        """
        transfer = self._open.get(request)
        if transfer is None or transfer.flow is None:
            return 0
        sent = self.link.sent_of(transfer.flow)
        return self.costs.tokens_in(transfer.present_tokens, sent)

    def give_up(self, request: Request) -> None:
        """End the wait for a request's blocks; no effect without a transfer."""
        transfer = self._open.pop(request, None)
        if transfer is not None and transfer.flow is not None:
            self.link.drop(transfer.flow)

    def _landed(self, flow: Flow) -> None:
        if flow.purpose is Purpose.COPY:
            self._copies.pop(flow)(True)
            return
        request = flow.request
        assert request is not None  # noqa: S101 (only copies are nobody's)
        transfer = self._open.get(request)
        if transfer is not None and transfer.flow is flow:
            del self._open[request]
            (self._on_pulled if flow.purpose is Purpose.PULL else self._on_landed)(request, self)

    # Failures

    def set_capacity(self, ratio: float) -> None:
        """The capacity changes to a share of the whole; a cut that lasts is noticed later."""
        self._capacity_ratio = ratio
        self._apply(self.setup.dead_after_ns)

    def set_pool(self, *, up: bool) -> None:
        """A pool at one end failed, which closes its connections, or came back."""
        self._num_pools_down += -1 if up else 1
        self._apply(self._told_after_ns)

    def _apply(self, noticed_after_ns: int) -> None:
        ratio = 0.0 if self._num_pools_down else self._capacity_ratio
        if (self.link.bits_per_s > 0) != (ratio > 0):
            self.changed_at_ns = self._clock.now_ns
        self.link.set_rate(self.setup.bits_per_s * ratio)
        if ratio <= 0:
            self._clock.after(noticed_after_ns, self._maybe_dead, self.changed_at_ns)
        else:
            self._clock.after(self._told_after_ns, self._tell_alive, self.changed_at_ns)

    def _maybe_dead(self, silent_since_ns: int) -> None:
        """The link is dead if the silence has lasted."""
        if silent_since_ns == self.changed_at_ns and self._taken_for_alive:
            self._taken_for_alive = False
            self._lose_copies()
            self._on_change(self, False)

    def _lose_copies(self) -> None:
        for flow, ended in list(self._copies.items()):
            self.link.drop(flow)
            ended(False)
        self._copies.clear()

    def _tell_alive(self, back_since_ns: int) -> None:
        if back_since_ns == self.changed_at_ns and not self._taken_for_alive:
            self._taken_for_alive = True
            self.link.goodput.restart()
            self._on_change(self, True)
