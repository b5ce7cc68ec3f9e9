"""How long an instance's queue is, from late reports and from what was sent since.

Instances work first come first served. A report says how much work an instance had when it was
observed; the gateway knows what it has sent since. Together they give the instant the instance will
be free, which orders instances the same way at every later moment, so a heap keeps them sorted.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Load:
    observed_at_ns: int = 0
    free_at_ns: int = 0
    ready: bool = True
    version: int = 0
    sent: deque[tuple[int, int]] = field(default_factory=deque)


class LoadBook:
    """Predicted waits of a set of instances.

    Args:
        names: The instances.
        stale_after_ns: Age beyond which a report counts as unknown.
    """

    def __init__(self, names: list[str], stale_after_ns: int) -> None:
        self._stale_after_ns = stale_after_ns
        self.names = tuple(names)
        self._loads = {name: _Load() for name in names}
        self._order = [(0, name, 0) for name in names]
        heapq.heapify(self._order)

    def report(self, name: str, observed_at_ns: int, backlog_ns: int) -> None:
        """An instance had `backlog_ns` of work left at `observed_at_ns`. Older ones are ignored."""
        load = self._loads[name]
        if observed_at_ns < load.observed_at_ns:
            return
        load.observed_at_ns = observed_at_ns
        free_at = observed_at_ns + backlog_ns
        while load.sent and load.sent[0][0] <= observed_at_ns:
            load.sent.popleft()
        for sent_at_ns, work_ns in load.sent:
            free_at = max(free_at, sent_at_ns) + work_ns
        self._move(name, load, free_at)

    def dispatch(self, name: str, now_ns: int, work_ns: int) -> None:
        """The gateway sends work that takes `work_ns` to an instance."""
        load = self._loads[name]
        load.sent.append((now_ns, work_ns))
        self._move(name, load, max(load.free_at_ns, now_ns) + work_ns)

    def set_ready(self, name: str, *, ready: bool) -> None:
        """An instance became healthy, or stopped being so."""
        load = self._loads[name]
        load.ready = ready
        self._move(name, load, load.free_at_ns)

    def least(self) -> str | None:
        """The ready instance that is free first, by name among equals; None if none is ready.

        Costs O(log n) amortised over the updates.
        """
        while self._order:
            if self._is_current(self._order[0]):
                return self._order[0][1]
            heapq.heappop(self._order)
        return None

    def last(self, names: Iterable[str]) -> str | None:
        """The ready one of some instances that is free last, by name among equals."""
        ready = (name for name in names if self._loads[name].ready)
        return min(ready, key=lambda name: (-self._loads[name].free_at_ns, name), default=None)

    def in_order(self) -> Iterator[str]:
        """Ready instances, the one that is free first comes first. The book must not change.

        The first costs as much as `least`, each further one O(log n) plus the outdated entries
        that are passed over.
        """
        if self.least() is None:
            return
        heap = self._order
        yield heap[0][1]
        # Walks the heap without taking it apart: behind an entry come its two children.
        edge = [(heap[i], i) for i in (1, 2) if i < len(heap)]
        heapq.heapify(edge)
        while edge:
            entry, index = heapq.heappop(edge)
            if self._is_current(entry):
                yield entry[1]
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heapq.heappush(edge, (heap[child], child))

    def _is_current(self, entry: tuple[int, str, int]) -> bool:
        load = self._loads[entry[1]]
        return load.version == entry[2] and load.ready

    def wait_ns(self, name: str, now_ns: int) -> int | None:
        """Predicted wait of a request sent now; None when the last report is too old."""
        load = self._loads[name]
        if now_ns - load.observed_at_ns > self._stale_after_ns:
            return None
        return max(0, load.free_at_ns - now_ns)

    def _move(self, name: str, load: _Load, free_at_ns: int) -> None:
        load.free_at_ns = free_at_ns
        load.version += 1
        if load.ready:
            heapq.heappush(self._order, (free_at_ns, name, load.version))
