"""The parts of a run, as those see them that observe, steer or break it."""

from __future__ import annotations

from typing import Protocol

from prfaas.sim.engine.decode_instance import DecodeInstance
from prfaas.sim.engine.dispatch_driver import Front
from prfaas.sim.engine.prefill_instance import PrefillInstance
from prfaas.sim.engine.transport import Transport
from prfaas.sim.system.clock import Clock
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import Setup


class RunParts(Protocol):
    """A run under way.

    Attributes:
        setup: What it depends on.
        clock: Virtual time.
        front: The dispatcher and what it is told.
        open: Requests under way, by index.
        transports: Links by PrfaaS cluster.
        locals: Prefill instances of the PD cluster, by name.
        remotes: Prefill instances of the PrfaaS clusters, by name.
        decoders: Decode instances, by name.
    """

    setup: Setup
    clock: Clock
    front: Front
    open: dict[int, Request]
    transports: dict[str, Transport]
    locals: dict[str, PrefillInstance]
    remotes: dict[str, PrefillInstance]
    decoders: dict[str, DecodeInstance]

    @property
    def busy(self) -> bool:
        """Whether requests are under way or yet to come."""

    def again(self, request: Request) -> None:
        """Route a request anew that has lost what it had."""
