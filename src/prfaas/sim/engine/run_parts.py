"""The parts of a run, as those see them that observe, steer or break it."""

from __future__ import annotations

from typing import Protocol

from prfaas.sim.engine.request_run import RequestRun, RunResources
from prfaas.sim.resources.prefill_instance import PrefillInstance


class RunParts(RunResources, Protocol):
    """A run under way.

    Attributes:
        open: Requests under way, by index.
        locals: Prefill instances of the PD cluster, by name.
        remotes: Prefill instances of the PrfaaS clusters, by name.
    """

    open: dict[int, RequestRun]
    locals: dict[str, PrefillInstance]
    remotes: dict[str, PrefillInstance]

    @property
    def busy(self) -> bool:
        """Return True if requests are running or will arrive."""
