"""Tokens and block hashes of the beginnings of texts, the least used forgotten first."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from dataclasses import dataclass

_ENTRY_BYTES = 400
"""Key, objects and their places in the table."""
_HASH_BYTES = 80
"""A block hash as an object of its own, and its place in a tuple."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a text, in the company of all that stands before it.

    Attributes:
        token_ids: Its tokens.
        hashes: Block hashes that end in it.
    """

    token_ids: array[int]
    hashes: tuple[bytes, ...]

    @property
    def num_bytes(self) -> int:
        """Memory it takes, about."""
        return (
            _ENTRY_BYTES
            + self.token_ids.itemsize * len(self.token_ids)
            + _HASH_BYTES * len(self.hashes)
        )


class SpanCache:
    """Spans by a digest of the text up to their end. Threads may share it.

    Args:
        num_bytes_max: Limit of all spans together, bytes.
    """

    def __init__(self, num_bytes_max: int) -> None:
        self._num_bytes_max = num_bytes_max
        self._num_bytes = 0
        self._spans: OrderedDict[bytes, Span] = OrderedDict()
        self._lock = threading.Lock()
        self.age = 0
        """How many times everything was forgotten."""

    @property
    def num_bytes(self) -> int:
        """Memory that is taken, about."""
        return self._num_bytes

    def get(self, key: bytes) -> Span | None:
        """The span under `key`, which then counts as the last one used."""
        with self._lock:
            span = self._spans.get(key)
            if span is not None:
                self._spans.move_to_end(key)
            return span

    def put(self, key: bytes, span: Span, age: int) -> None:
        """Remember a span that was begun at an age, and forget others if that takes too much."""
        with self._lock:
            if age != self.age:
                return
            before = self._spans.pop(key, None)
            self._num_bytes += span.num_bytes - (before.num_bytes if before else 0)
            self._spans[key] = span
            while self._num_bytes > self._num_bytes_max:
                _, gone = self._spans.popitem(last=False)
                self._num_bytes -= gone.num_bytes

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._spans.clear()
            self.age += 1
            self._num_bytes = 0
