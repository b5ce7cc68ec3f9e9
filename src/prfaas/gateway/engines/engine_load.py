"""Load of an engine, from the Prometheus metrics of vLLM or SGLang."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_SAMPLE = re.compile(
    rb"^(?:vllm|sglang):(num_requests_waiting|num_requests_running|kv_cache_usage_perc|"
    rb"generation_tokens_total|"
    rb"num_queue_reqs|num_running_reqs|token_usage)(\{[^}\n]*\})? "
    rb"([0-9]{1,20}(?:\.[0-9]{0,20})?(?:[eE][+-]?[0-9]{1,4})?)$",
    re.MULTILINE,
)
_WAITING, _RUNNING, _USE = b"num_requests_waiting", b"num_requests_running", b"kv_cache_usage_perc"
_MADE = b"generation_tokens_total"
_OF_SGLANG = {b"num_queue_reqs": _WAITING, b"num_running_reqs": _RUNNING, b"token_usage": _USE}


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One poll of an engine; None if it does not report a value.

    Attributes:
        num_running: Requests in its batch.
        kv_use: Share of its KV cache in use, in [0, 1]; the fullest of several.
        num_made: Output tokens that it has made since it was started.
    """

    num_waiting: int | None = None
    num_running: int | None = None
    kv_use: float | None = None
    num_made: int | None = None


UNKNOWN_LOAD = EngineLoad()


def load_in(metrics: bytes, rank: int | None = None) -> EngineLoad:
    """The load on a page of metrics: of a data-parallel rank, or summed over all of them."""
    label = b"" if rank is None else b'engine="%d"' % rank
    found: dict[bytes, list[float]] = {_WAITING: [], _RUNNING: [], _USE: [], _MADE: []}
    for name, labels, value in _SAMPLE.findall(metrics):
        if label in labels:
            found[_OF_SGLANG.get(name, name)].append(float(value))
    use = [value for value in found[_USE] if 0 <= value <= 1]
    waiting, running, made = (_sum(found[name]) for name in (_WAITING, _RUNNING, _MADE))
    return EngineLoad(waiting, running, max(use, default=None), made)


def _sum(values: list[float]) -> int | None:
    known = values and all(map(math.isfinite, values))
    return round(sum(values)) if known else None
