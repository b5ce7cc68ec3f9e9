"""Data-parallel ranks behind one URL: one table of the deployment file, an engine for each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

RANKS_MAX = 256
_EVENTS = ("kv_events", "kv_events_replay")
PORT_MAX = 65535


def with_ranks(engines: object) -> object:
    """Expand tables with `ranks` into one for each rank; all else is left to the usual checks.

    Args:
        engines: Tables by name, as a deployment file has them.

    Raises:
        ValueError: The tables of the ranks would not be those of a data-parallel engine.
    """
    if not isinstance(engines, Mapping):
        return engines
    found: dict[Any, object] = {}
    for name, table in engines.items():
        for each, expanded in _tables(name, table):
            if each in found or (each != name and each in engines):
                raise ValueError(f"engine {name}: its rank {each} has the name of another engine")
            found[each] = expanded
    return found


def _tables(name: Any, table: object) -> Iterator[tuple[Any, object]]:
    num_ranks = table.get("ranks") if isinstance(table, Mapping) else None
    if not isinstance(table, Mapping) or not isinstance(num_ranks, int) or num_ranks < 2:
        yield name, table
        return
    if num_ranks > RANKS_MAX:
        raise ValueError(f"engine {name}: {num_ranks} ranks are more than {RANKS_MAX}")
    if "rank" in table:
        raise ValueError(f"engine {name}: give `ranks` for all of them, or `rank` for this one")
    rest = {key: value for key, value in table.items() if key != "ranks"}
    for rank in range(num_ranks):
        events = {key: _shifted(name, key, rest[key], rank) for key in _EVENTS if key in rest}
        yield f"{name}-{rank}", rest | events | {"rank": rank}


def _shifted(name: Any, key: str, endpoint: object, rank: int) -> object:
    """The endpoint of a rank's publisher: vLLM adds the rank to the port; ValueError if it has
    none."""
    if not isinstance(endpoint, str):
        return endpoint
    if not endpoint.startswith("tcp://"):
        raise ValueError(
            f"engine {name}: {key} is {endpoint!r}, where vLLM publishes for one rank alone; give "
            "tcp://HOST:PORT of rank 0, to whose port the rank is added"
        )
    host, _, port = endpoint.rpartition(":")
    if not port.isdecimal() or int(port) + rank > PORT_MAX:
        raise ValueError(f"engine {name}: {key} {endpoint!r} has no port for rank {rank}")
    return f"{host}:{int(port) + rank}"
