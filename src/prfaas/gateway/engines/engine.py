"""One engine as the gateway sees it: its load, read from the metrics of vLLM or SGLang, and the
errors of requests to it."""

from __future__ import annotations

import asyncio
import math
import re
from dataclasses import dataclass, field

from prfaas.config.clusters import ClusterRole, EngineTable
from prfaas.errors import EngineError

_SAMPLE = re.compile(
    rb"\n(?:vllm|sglang):(num_requests_waiting|num_requests_running|kv_cache_usage_perc|"
    rb"generation_tokens_total|"
    rb"num_queue_reqs|num_running_reqs|token_usage)(\{[^}\n]*\})? "
    rb"([0-9]{1,20}(?:\.[0-9]{0,20})?(?:[eE][+-]?[0-9]{1,4})?)(?=\n)"
)
_WAITING, _RUNNING, _USE = b"num_requests_waiting", b"num_requests_running", b"kv_cache_usage_perc"
_MADE = b"generation_tokens_total"
_OF_SGLANG = {b"num_queue_reqs": _WAITING, b"num_running_reqs": _RUNNING, b"token_usage": _USE}


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One poll of an engine; None if it does not report a value."""

    num_waiting: int | None = None
    num_running: int | None = None
    """Requests in its batch."""
    kv_use: float | None = None
    """Share of its KV cache in use, in [0, 1]; the fullest of several."""
    num_made: int | None = None
    """Output tokens that it has made since it was started."""


UNKNOWN_LOAD = EngineLoad()


def load_in(metrics: bytes, rank: int | None = None) -> EngineLoad:
    """The load on a page of metrics: of a data-parallel rank, or summed over all of them."""
    label = b"" if rank is None else b'engine="%d"' % rank
    found: dict[bytes, list[float]] = {_WAITING: [], _RUNNING: [], _USE: [], _MADE: []}
    for name, labels, value in _SAMPLE.findall(b"\n%b\n" % metrics):
        if label in labels:
            found[_OF_SGLANG.get(name, name)].append(float(value))
    use = [value for value in found[_USE] if 0 <= value <= 1]
    waiting, running, made = (_sum(found[name]) for name in (_WAITING, _RUNNING, _MADE))
    return EngineLoad(waiting, running, max(use, default=None), made)


def _sum(values: list[float]) -> int | None:
    known = values and all(map(math.isfinite, values))
    return round(sum(values)) if known else None


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
        reason: What became of the connection, for operators.
    """

    def __init__(self, message: str, *, had_request: bool = False, reason: str = "") -> None:
        super().__init__(message)
        self.had_request, self.reason = had_request, reason


@dataclass(slots=True)
class Engine:
    """One engine, as the gateway sees it."""

    name: str
    """Name in the deployment file."""
    url: str
    role: ClusterRole
    pool: str
    """Name of the pool node on its host."""
    rank: int | None = None
    """Data-parallel rank among those behind the URL; None if it is alone there."""
    adapters: frozenset[str] = frozenset()
    """Names of the adapters that it last listed."""
    max_model_len: int = 0
    """Longest sequence, tokens, as the engine last reported it; outlives its readiness, 0 before it
    was ever ready."""
    num_slots: int = 1
    """Limit of concurrent sequences."""
    is_ready: bool = False
    """True while the last health check succeeded."""
    why_down: str = "not probed yet"
    """Reason why it is not ready, for operators; "" if it is."""
    num_lost: int = 0
    """Times that it was ready and then was not."""
    num_in_flight: int = 0
    """Legs that this gateway has running on it."""
    num_broken: int = 0
    """Legs that it failed at since it last completed one, or became ready."""
    num_looks: int = 0
    num_missed: int = 0
    """Looks in a row that it did not answer in time."""
    load: EngineLoad = UNKNOWN_LOAD
    """Its load at the last poll."""
    load_at_ns: int = 0
    """Time of that poll."""
    legs: set[asyncio.Timeout] = field(default_factory=set)
    """One for each of the legs, to end it by."""

    @classmethod
    def of(cls, name: str, url: str, role: ClusterRole, table: EngineTable) -> Engine:
        """The engine of a table of the deployment file."""
        return cls(name, url.rstrip("/"), role, table.pool, table.rank, num_slots=table.num_slots)

    @property
    def num_lost_legs(self) -> int:
        """Legs that it had when it died, once it is known to be gone; at least 1."""
        return max(1, self.num_broken + self.num_in_flight)
