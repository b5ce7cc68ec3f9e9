"""Copies of checkpoints that a log has to have: its head file, and those kept elsewhere."""

from __future__ import annotations

from prfaas.core.audit.chain import Line, parse_line


class Head:
    """A copy of a checkpoint that has to be in the log. `data`: Content of the file; None if there
    is none."""

    def __init__(self, name: str, data: bytes | None) -> None:
        self.name, self._is_present = name, data is not None
        self.line = parse_line(data.removesuffix(b"\n")) if data is not None else None
        self.is_here = False
        """True if the log has this checkpoint."""

    def take(self, checkpoint: Line) -> None:
        """Compare with a valid checkpoint of the log."""
        if self.line is not None and self.line.number == checkpoint.number:
            self.is_here = self.line.body == checkpoint.body

    def damage(self, signed_lines: int) -> str | None:
        """Describe its absence from a log with this last signed line; None if it is here."""
        if self.line is None:
            state = "damaged" if self._is_present else "missing"
            return f"{self.name} is {state}: it would show if the end was cut off"
        if self.line.number > signed_lines:
            return (
                f"the end was cut off: {self.name} has a checkpoint at line {self.line.number}, "
                f"the last one here is at line {signed_lines}"
            )
        if not self.is_here:
            return f"{self.name} is no checkpoint of this log (line {self.line.number})"
        return None
