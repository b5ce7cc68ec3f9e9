"""Placement: each host of a site is a placement group, all of whose parts are on one node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from prfaas.errors import ConfigError

Needs = Mapping[str, float]
READY_S = 60.0
"""Time in which Ray places a host at the start."""


class Host:
    """A pool node with its engines, or a gateway: parts that run on one node.

    Args:
        name: Of its first part.
        needs: Resources of each part by its name.
    """

    def __init__(self, name: str, needs: Mapping[str, Needs]) -> None:
        self.name, self.needs = name, needs
        self._index = {part: i for i, part in enumerate(needs)}
        self._group: Any = None

    @property
    def total(self) -> dict[str, float]:
        """Resources of all its parts."""
        found: dict[str, float] = {}
        for needs in self.needs.values():
            for key, amount in needs.items():
                found[key] = found.get(key, 0.0) + amount
        return found

    def reserve(self) -> None:
        """Ask Ray for a node."""
        from ray.util.placement_group import placement_group

        bundles = [dict(needs) for needs in self.needs.values()]
        self._group = placement_group(bundles, strategy="STRICT_PACK")

    def release(self) -> None:
        """Give the node back."""
        from ray.util.placement_group import remove_placement_group

        if self._group is not None:
            remove_placement_group(self._group)

    def node(self) -> tuple[str, str] | None:
        """Id and address of its node; None while Ray looks for one."""
        import ray
        from ray.util.placement_group import placement_group_table

        table = placement_group_table(self._group)
        if table.get("state") != "CREATED":
            return None
        ids = set(table["bundles_to_node_id"].values())
        for node in ray.nodes():
            if node["NodeID"] in ids and node["Alive"]:
                return str(node["NodeID"]), str(node["NodeManagerAddress"])
        return None

    def options(self, part: str) -> dict[str, Any]:
        """Options of the actor of one of its parts."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = dict(self.needs[part])
        return {
            "num_cpus": needs.pop("CPU", 0),
            "num_gpus": needs.pop("GPU", 0),
            "resources": needs,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._index[part]
            ),
        }


def check_room(hosts: Sequence[Host]) -> None:
    """Check that each host fits on a node of the cluster, were it alone there; ConfigError if one
    does not."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for host in hosts:
        if not any(_fits(host.total, node) for node in nodes):
            largest = "; ".join(_words(node) for node in nodes)
            raise ConfigError(
                f"no node of the Ray cluster has {_words(host.total)} for {host.name} and the "
                f"parts beside it; the {len(nodes)} nodes have {largest}. Add a node, or lower "
                "--need"
            )


async def placed(hosts: Sequence[Host]) -> None:
    """Wait until Ray has placed all hosts; ConfigError if it has not in `READY_S`."""
    deadline = time.monotonic() + READY_S
    while missing := [host for host in hosts if host.node() is None]:
        if time.monotonic() > deadline:
            host = missing[0]
            raise ConfigError(
                f"Ray has no room for {host.name} and the parts beside it, which need "
                f"{_words(host.total)} on one node: others use it; `ray status` shows who"
            )
        await asyncio.sleep(0.1)


def _fits(needs: Needs, node: Needs) -> bool:
    return all(node.get(key, 0.0) >= amount for key, amount in needs.items())


def _words(resources: Needs) -> str:
    shown = {k: v for k, v in resources.items() if ":" not in k and "memory" not in k}
    return ", ".join(f"{amount:g} {key}" for key, amount in sorted(shown.items())) or "nothing"
