"""Processor cores of engines without a GPU, and PrfaaS engines that have none of their own."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator

from prfaas.config.clusters import ClusterRole
from prfaas.config.deployment import Deployment

BIND = "VLLM_CPU_OMP_THREADS_BIND"
"""vLLM's variable for the cores of its threads; `cpus` sets it."""
_ALL = ("auto", "nobind")
_RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")


def runs_on_cpu() -> bool:
    """Return True if the vLLM of this environment is the CPU build."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def within(deployment: Deployment) -> dict[str, frozenset[str]]:
    """PD engines on whose cores a PrfaaS engine computes: they have all of its cores.

    Only engines that one machine starts and whose `cpus` are given are compared. Engines on GPUs,
    and timing engines, share no cores.

    Returns:
        By PrfaaS engine; only those that share cores.
    """
    local = dict(_cores(deployment, ClusterRole.PD))
    found = {
        name: frozenset(pd for pd, theirs in local.items() if _is_within(own, theirs))
        for name, own in _cores(deployment, ClusterRole.PRFAAS)
    }
    return {name: engines for name, engines in found.items() if engines}


def _cores(deployment: Deployment, role: ClusterRole) -> Iterator[tuple[str, set[int] | None]]:
    """Engines that this machine starts, and their cores; None is all."""
    if not runs_on_cpu():
        return
    for table in deployment.with_role(role):
        for name, engine in table.engines.items() if table.timing is None else ():
            bound = engine.env.get(BIND, engine.cpus)
            if not engine.url and (bound in _ALL or _listed(bound)):
                yield name, None if bound in _ALL else _listed(bound)


def _listed(bound: str) -> set[int]:
    """Cores of all ranks of "0-3,8|4-7"; empty if it is no such list."""
    found: set[int] = set()
    for part in re.split(r"[,|]", bound):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            return set()
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def _is_within(own: set[int] | None, theirs: set[int] | None) -> bool:
    return theirs is None or (own is not None and own <= theirs)
