"""The simulator's driver of the core's dispatcher: what happens in the run, in the core's words."""

from __future__ import annotations

from prfaas.core.dispatch import (
    Arrival,
    DispatchSettings,
    HomeCluster,
    Member,
    Refused,
    RemoteCluster,
    Routed,
    ThresholdMoved,
)
from prfaas.core.dispatcher import Dispatcher
from prfaas.core.link_book import LinkReport
from prfaas.sim.caches import PD_POOL, PRFAAS_POOL, Caches
from prfaas.sim.request import Request
from prfaas.sim.setup import Setup


class Front:
    """The gateway of a simulated run. Output lengths do not get past it.

    Args:
        setup: The system.
    """

    def __init__(self, setup: Setup) -> None:
        self.caches = Caches(setup.cache)
        self._block_tokens = setup.cache.block_tokens
        self.prefill_names = tuple(f"p{i:05}" for i in range(setup.num_prefill))
        self.prfaas_names = tuple(f"r{i:05}" for i in range(setup.num_prfaas))
        self.decode_names = tuple(f"d{i:05}" for i in range(setup.num_decode))
        routing = setup.routing
        self.dispatcher = Dispatcher(
            HomeCluster(
                "pd",
                tuple(Member(name, PD_POOL) for name in self.prefill_names),
                tuple(Member(name, PD_POOL) for name in self.decode_names) or None,
                setup.costs,
            ),
            [
                RemoteCluster(
                    "prfaas",
                    tuple(Member(name, PRFAAS_POOL) for name in self.prfaas_names),
                    setup.costs,
                )
            ],
            DispatchSettings(
                routing.policy,
                routing.offload_threshold,
                routing.bandwidth,
                routing.moving_threshold,
                setup.slo.ttft_ns,
                routing.admission,
                setup.signals.stale_after_ns,
            ),
        )
        self.set_link(up=True)

    def route(self, request: Request, now_ns: int, *, again: bool) -> Routed | Refused:
        """Decide for a request that arrives, or whose work was lost."""
        blocks = self._block_tokens
        arrival = Arrival(
            request.index,
            request.num_prompt_tokens,
            request.num_prompt_tokens,
            self.caches.hits(request),
            shippable_tokens=(request.num_prompt_tokens - 1) // blocks * blocks
            if request.block_ids
            else None,
            tenant=request.tenant,
        )
        return self.dispatcher.arrive(arrival, now_ns, again=again)

    def choose_decode(self, request: Request) -> str | None:
        """Name of the instance that decodes a request, chosen when first asked for."""
        return self.dispatcher.choose_decode(request.index)

    def decoder_of(self, request: Request) -> str | None:
        """Name of the instance that was chosen to decode a request."""
        return self.dispatcher.decoder_of(request.index)

    def prefills(self, request: Request) -> str | None:
        """Name of the instance that prefills a request; None once the end was heard of."""
        return self.dispatcher.prefills(request.index)

    def prefilled(self, request: Request, now_ns: int) -> None:
        """The end of a request's prefill was heard of."""
        self.dispatcher.prefilled(request.index, now_ns)

    def landed(self, request: Request) -> None:
        """All blocks of a request have crossed the link."""
        self.dispatcher.transfer_over(request.index)

    def ended(self, request: Request, now_ns: int) -> None:
        """A request is over."""
        self.dispatcher.end(request.index, now_ns)

    def set_link(self, *, up: bool) -> list[int]:
        """The link was found dead or alive; indices of the requests that were on it."""
        return self.dispatcher.set_link(PRFAAS_POOL, PD_POOL, up=up)

    def set_ready(self, name: str, *, ready: bool, now_ns: int) -> None:
        """An instance failed or recovered."""
        self.dispatcher.set_ready(name, ready=ready, now_ns=now_ns)

    def report_load(self, name: str, observed_at_ns: int, num_waiting: int) -> None:
        """So many requests were seen to wait at an instance."""
        self.dispatcher.report_load(name, observed_at_ns, num_waiting)

    def report_link(self, report: LinkReport) -> None:
        """The link was seen."""
        self.dispatcher.report_link(PRFAAS_POOL, PD_POOL, report)

    def tick(self, now_ns: int) -> list[ThresholdMoved]:
        """One interval of the short-term loop."""
        return self.dispatcher.tick(now_ns)

    @property
    def offload_threshold(self) -> int:
        """Current t, tokens."""
        return self.dispatcher.links.between(PRFAAS_POOL, PD_POOL).policy.offload_threshold
