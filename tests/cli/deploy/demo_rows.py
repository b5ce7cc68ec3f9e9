"""A record as the demos show it, and the lines of their table."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from rich.table import Table

RECORD: dict[str, Any] = {
    "path": "remote",
    "num_prompt_tokens": 112_134,
    "cached_tokens": 11_904,
    "num_new_tokens": 100_230,
    "explanation": "long: 100,230 new tokens against 1,500",
    "reason": "above_threshold",
    "kv_bytes": 123_456_789,
    "transfer_ms": 12_345.6,
    "ttft_ms": 23_456.7,
    "second_ms": 34_567.8,
}


def printed_at(table: Table, width: int) -> list[str]:
    """Lines of a table in a terminal of that width."""
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()
