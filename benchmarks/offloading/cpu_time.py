"""CPU time of the parts of a deployment, read from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from prfaas.cli.host.processes import ProcessPart, members

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
USER, CHILDREN_END = 11, 15
"""Where user, system and the two of ended children lie in /proc/PID/stat, after the name."""


def cpu_seconds(part: ProcessPart) -> float:
    """CPU time so far of the processes of a part and of their ended children, seconds."""
    return sum(map(_of_process, members(part.process.pid))) if part.process else 0.0


def all_cpu_seconds(parts: Iterable[ProcessPart]) -> dict[str, float]:
    """CPU time so far of each part, seconds."""
    return {part.name: cpu_seconds(part) for part in parts}


def _of_process(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[USER:CHILDREN_END])) / TICKS_PER_S
