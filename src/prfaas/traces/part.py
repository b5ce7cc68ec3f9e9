"""A part of a trace, by instants and number of requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from prfaas.traces import limits
from prfaas.traces.drops import DroppedError
from prfaas.units import NS_PER_S

_DAY_NS = 86_400 * NS_PER_S


@dataclass(frozen=True, slots=True)
class TracePart:
    """A part of a trace; instants count from the earliest request of the file.

    Attributes:
        start_ns: Earlier requests are left out.
        duration_ns: Length of the part; None is all that is left.
        num_requests: The earliest requests of the part are kept, up to this number; None is all.
    """

    start_ns: int = 0
    duration_ns: int | None = None
    num_requests: int | None = None

    @property
    def is_whole(self) -> bool:
        """Return True if the part is the whole trace."""
        return not self.start_ns and self.duration_ns is None and self.num_requests is None

    def check(self, since_ns: int) -> None:
        """Check an instant.

        Raises:
            DroppedError: It is outside.
        """
        late = self.duration_ns is not None and since_ns >= self.start_ns + self.duration_ns
        if late or since_ns < self.start_ns:
            raise OutsideError


class OutsideError(DroppedError):
    """A request outside the part."""

    def __init__(self) -> None:
        super().__init__("outside the part that was asked for", damaged=False)


@dataclass(slots=True)
class Days:
    """Number of requests and earliest instant of each day of a trace."""

    _counts: dict[int, int] = field(default_factory=dict)
    _earliest_ns: dict[int, int] = field(default_factory=dict)

    def add(self, at_ns: int) -> None:
        """Count a request."""
        day = at_ns // _DAY_NS
        self._counts[day] = self._counts.get(day, 0) + 1
        self._earliest_ns[day] = min(self._earliest_ns.get(day, at_ns), at_ns)

    def earliest_ns(self) -> int | None:
        """Return the earliest instant, or None without requests.

        Days that are further than `limits.SPAN_S` from the median day do not count: their instants
        are damaged.
        """
        half, median = sum(self._counts.values()) / 2, 0
        for day in sorted(self._counts):
            half -= self._counts[day]
            if half <= 0:
                median = day
                break
        span = limits.SPAN_S * NS_PER_S // _DAY_NS
        near = [at for day, at in self._earliest_ns.items() if abs(day - median) <= span]
        return min(near, default=None)
