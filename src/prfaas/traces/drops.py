"""Lines that a reader drops, and why."""

from __future__ import annotations

from dataclasses import dataclass, field


class DroppedError(Exception):
    """A line that gives no request.

    Args:
        reason: The same for all lines with this problem; the count goes by it.
        detail: The problem of this line, with its value and the limit.
        damaged: False for a line that is as it should be but not wanted.
    """

    def __init__(self, reason: str, detail: str = "", *, damaged: bool = True) -> None:
        super().__init__(detail or reason)
        self.reason, self.damaged = reason, damaged


@dataclass(slots=True)
class DropReason:
    """Number of lines dropped for one reason, with the first of them."""

    damaged: bool
    first_line: int
    first_detail: str
    count: int = 0


@dataclass(slots=True)
class Drops:
    """Count of dropped lines by reason.

    Attributes:
        num_lines: Lines that were read and are not blank, without a header.
    """

    num_lines: int = 0
    reasons: dict[str, DropReason] = field(default_factory=dict)

    def add(self, line: int, error: DroppedError) -> None:
        """Count a dropped line."""
        reason = self.reasons.setdefault(error.reason, DropReason(error.damaged, line, str(error)))
        reason.count += 1

    @property
    def num_dropped(self) -> int:
        """Dropped lines."""
        return sum(reason.count for reason in self.reasons.values())

    @property
    def num_damaged(self) -> int:
        """Dropped lines that are damaged."""
        return sum(reason.count for reason in self.reasons.values() if reason.damaged)

    @property
    def damaged_ratio(self) -> float:
        """Share of damaged lines in all lines."""
        return self.num_damaged / max(self.num_lines, 1)
