"""Modules of tests stand for themselves: what several need is in a module with a name of its own.

A test module that imports another one runs with it: a failure, a rename or a fixture of one changes
the other, and pytest may collect tests twice.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("tests", "benchmarks", "prfaas")
IN_TEXT = re.compile(r"^\s*(?:from|import) (?:tests|benchmarks)\.[\w.]*\btest_\w+", re.MULTILINE)


def imported(source: str) -> Iterator[str]:
    """Modules of ours that a source imports, and those that a program in its text imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith(OURS))
        elif isinstance(node, ast.ImportFrom) and (node.level or str(node.module).startswith(OURS)):
            module = node.module or ""
            yield module
            if not module or ROOT.joinpath(*module.split(".")).is_dir():
                yield from (name.name for name in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from IN_TEXT.findall(node.value)


def modules_in(source: str) -> list[str]:
    """Test modules among these."""
    return [name for name in imported(source) if re.search(r"(?:^|\.)test_\w+$", name)]


def test_no_module_imports_a_test_module() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): names
        for folder in ("tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if path != Path(__file__)
        if (names := modules_in(path.read_text()))
    }
    assert not found, "move what they share to a module that is no test"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from .test_a import b", ["test_a"]),
        ("from . import test_a", ["test_a"]),
        ("from tests.core import test_a", ["test_a"]),
        ("from tests.core.test_a import b", ["tests.core.test_a"]),
        ("import tests.core.test_a", ["tests.core.test_a"]),
        ("code = '''\nfrom tests.core.test_a import b\n'''", ["\nfrom tests.core.test_a"]),
        ("from aiohttp.test_utils import TestServer", []),
        ("from tests.core.helpers import test_value_of", []),
    ],
)
def test_an_import_of_a_test_module_is_found(source: str, expected: list[str]) -> None:
    assert modules_in(source) == expected
