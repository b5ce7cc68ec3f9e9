"""Python instructions that a call takes: a count, since times depend on the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


class Counter:
    """Instructions of all Python functions that are called while it is set as the tracer."""

    def __init__(self) -> None:
        self.num_instructions = 0

    def called(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        """Have the instructions of a function counted."""
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, _frame: FrameType, event: str, _argument: Any) -> Any:
        self.num_instructions += event == "opcode"
        return self._step


def counted(call: Callable[[], T]) -> tuple[T, int]:
    """The result of a call, and its instructions."""
    counter, before = Counter(), sys.gettrace()
    sys.settrace(counter.called)
    try:
        found = call()
    finally:
        sys.settrace(before)
    return found, counter.num_instructions
