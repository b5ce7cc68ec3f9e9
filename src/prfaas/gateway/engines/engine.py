"""One engine as the gateway sees it, and the errors of requests to it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from prfaas.config.clusters import ClusterRole, EngineTable
from prfaas.errors import EngineError
from prfaas.gateway.engines.engine_load import UNKNOWN_LOAD, EngineLoad

INTERNAL_ERROR = 500
"""Status of an engine that failed at this request; other 5xx are failures of the engine."""


class SuspectError(EngineError):
    """The engine failed at a request, by its fault or the request's: counts against nobody yet."""


class OtherModelError(EngineError):
    """The engine serves other models than the site."""


class NoResetError(EngineError):
    """The engine has no route by which its blocks can be dropped."""


class EngineUnreachableError(EngineError):
    """The engine took no connection, or dropped it before it answered.

    Attributes:
        had_request: True if it dropped the connection after the request was sent.
    """

    def __init__(self, message: str, *, had_request: bool = False) -> None:
        super().__init__(message)
        self.had_request = had_request


@dataclass(slots=True)
class Engine:
    """One engine, as the gateway sees it.

    Attributes:
        name: Name in the deployment file.
        pool: Name of the pool node on its host.
        rank: Data-parallel rank among those behind the URL; None if it is alone there.
        adapters: Names of the adapters that it last listed.
        max_model_len: Longest sequence, tokens, as the engine last reported it; outlives its
            readiness, 0 before it was ever ready.
        num_slots: Limit of concurrent sequences.
        is_ready: True while the last health check succeeded.
        why_down: Why it is not ready, for operators; "" if it is.
        num_lost: Times that it was ready and then was not.
        num_in_flight: Legs that this gateway has running on it.
        num_broken: Legs that it failed at since it last completed one, or became ready.
        num_missed: Looks in a row that it did not answer in time.
        load: Its load at the last poll.
        load_at_ns: Time of that poll.
        legs: One for each of the legs, to end it by.
    """

    name: str
    url: str
    role: ClusterRole
    pool: str
    rank: int | None = None
    adapters: frozenset[str] = frozenset()
    max_model_len: int = 0
    num_slots: int = 1
    is_ready: bool = False
    why_down: str = "not probed yet"
    num_lost: int = 0
    num_in_flight: int = 0
    num_broken: int = 0
    num_looks: int = 0
    num_missed: int = 0
    load: EngineLoad = UNKNOWN_LOAD
    load_at_ns: int = 0
    legs: set[asyncio.Timeout] = field(default_factory=set)

    @classmethod
    def of(cls, name: str, url: str, role: ClusterRole, table: EngineTable) -> Engine:
        """The engine of a table of the deployment file."""
        return cls(name, url.rstrip("/"), role, table.pool, table.rank, num_slots=table.num_slots)

    @property
    def num_lost_legs(self) -> int:
        """Legs that it had when it died, once it is known to be gone; at least 1."""
        return max(1, self.num_broken + self.num_in_flight)
