"""Transfers over one link: chunks go in as they are computed, whole prompts come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prfaas.core.costs import Costs
from prfaas.sim.clock import Clock
from prfaas.sim.link import Flow, SharedLink
from prfaas.sim.prefill import Job
from prfaas.sim.request import Request
from prfaas.sim.setup import LinkSetup


@dataclass(slots=True)
class _Transfer:
    """Blocks of one request. `present_tokens` of its prompt are at the destination already."""

    shipped_bytes: int
    present_tokens: int
    flow: Flow | None = None


class Transport:
    """The link from one PrfaaS cluster, and the transfers on it.

    Args:
        clock: Virtual time.
        setup: The link.
        costs: Bytes of prompts.
        on_landed: All blocks of a request are there.
        on_change: The link was found dead (False) or alive (True).
        told_after_ns: From the link's recovery until it is known.
    """

    def __init__(
        self,
        clock: Clock,
        setup: LinkSetup,
        costs: Costs,
        *,
        on_landed: Callable[[Request], None],
        on_change: Callable[[bool], None],
        told_after_ns: int,
    ) -> None:
        self._clock, self._setup, self._costs = clock, setup, costs
        self._on_landed, self._on_change = on_landed, on_change
        self._told_after_ns = told_after_ns
        self._taken_for_alive = True
        self._open: dict[Request, _Transfer] = {}
        self.link = SharedLink(
            clock,
            setup.bits_per_s,
            on_landed=self._landed,
            flow_bits_per_s=setup.flow_bits_per_s,
            delay_ns=setup.rtt_ns // 2,
        )

    def promise(self, request: Request, shipped_bytes: int, present_tokens: int) -> None:
        """A transfer was decided; its bytes come once prefill starts."""
        self._open[request] = _Transfer(shipped_bytes, present_tokens)

    def start(self, request: Request) -> None:
        """The prefill of a promised transfer starts."""
        transfer = self._open[request]
        transfer.flow = self.link.open(request, transfer.shipped_bytes)

    def chunk(self, job: Job, tokens: int) -> None:
        """The first `tokens` new tokens of a prompt are computed: ship what belongs to them."""
        request = job.request
        transfer = self._open.get(request)
        if transfer is None or transfer.flow is None or job.attempt != request.attempt:
            return
        last = tokens == request.num_new_tokens
        ready = transfer.shipped_bytes if last else self._ready_bytes(transfer, request, tokens)
        added = transfer.flow.added_bytes
        if last or ready > added:
            self.link.add(transfer.flow, max(0, ready - added), last=last)

    def give_up(self, request: Request) -> None:
        """What has crossed of a request's blocks is lost; without a transfer nothing happens."""
        transfer = self._open.pop(request, None)
        if transfer is not None and transfer.flow is not None:
            self.link.drop(transfer.flow)

    def set_capacity(self, ratio: float) -> None:
        """The capacity changes to a share of the whole; a cut that lasts is noticed later."""
        self.link.set_rate(self._setup.bits_per_s * ratio)
        if self.link.bits_per_s <= 0:
            self._clock.after(self._setup.dead_after_ns, self._maybe_dead)
        else:
            self._clock.after(self._told_after_ns, self._tell_alive)

    def _ready_bytes(self, transfer: _Transfer, request: Request, tokens: int) -> int:
        """Bytes that may leave; the linear state comes with the last chunk."""
        end = request.num_prompt_tokens - request.num_new_tokens + tokens
        shipped = self._costs.shipped_bytes(end, transfer.present_tokens)
        return max(0, shipped - self._costs.state_bytes)

    def _landed(self, flow: Flow) -> None:
        if flow.attempt == flow.request.attempt:
            del self._open[flow.request]
            self._on_landed(flow.request)

    def _maybe_dead(self, _argument: None) -> None:
        if self.link.bits_per_s <= 0 and self._taken_for_alive:
            self._taken_for_alive = False
            self._on_change(False)

    def _tell_alive(self, _argument: None) -> None:
        if self.link.bits_per_s > 0 and not self._taken_for_alive:
            self._taken_for_alive = True
            self._on_change(True)
