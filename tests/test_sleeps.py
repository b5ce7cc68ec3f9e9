"""Tests wait for what they need, not for a length of time: a sleep stands in a loop that asks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent
LOADS = {
    "deploy/renewing.py": "load before, while and after identities are replaced",
    "drill": "phases of a drill, with load before, during and after a fault",
    "gateway/churn.py": "time that a scripted engine serves a request",
    "lab/faults.py": "a path that is slow",
    "live/relay.py": "delay of a link",
    "s3/faulty.py": "a server that answers late",
}
"""Places, other than test modules, whose sleeps are what they simulate."""


def sleeps(tree: ast.Module) -> Iterator[ast.Call]:
    """Calls of sleep with a length, outside of loops that end by a condition."""
    waiting = {
        call for loop in ast.walk(tree) if isinstance(loop, ast.While) for call in ast.walk(loop)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("time.sleep", "asyncio.sleep")
            and ast.unparse(node.args[0]) != "0"
            and node not in waiting
        ):
            yield node


def test_no_test_sleeps_for_a_length_of_time() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}"
        for file in sorted(ROOT.rglob("*.py"))
        if file.name.startswith("test_") or not is_load(file)
        for call in sleeps(ast.parse(file.read_text()))
    ]
    assert not found, "wait until a condition holds, as `until` does"


def is_load(file: Path) -> bool:
    """Return True for files of `LOADS`."""
    place = file.relative_to(ROOT)
    return any(place.is_relative_to(each) for each in LOADS)


def test_a_sleep_outside_of_a_loop_is_found() -> None:
    source = "import time\ntime.sleep(0)\nwhile not done():\n    time.sleep(1)\ntime.sleep(2)\n"
    assert [call.lineno for call in sleeps(ast.parse(source))] == [5]
