"""Limits and times are values that are given: no test replaces a constant of a module.

A patched constant reaches only the places that look it up by its module: an argument's default, a
field's default and a name that another module imported keep the value of before, and nothing tells.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")
PATCHES = ("setattr", "delattr", "patch", "object")
"""Functions of pytest, of `unittest.mock`, and the built-in ones."""


def patches(source: str) -> Iterator[str]:
    """Replacements of constants, and of attributes of our modules whose names are computed."""
    tree = ast.parse(source)
    ours = {
        name.asname or name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("prfaas")
        for name in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) in PATCHES:
            if any(is_constant(word) for word in node.args[:2]) or is_computed(node, ours):
                yield ast.unparse(node)
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Attribute) and CONSTANT.fullmatch(target.attr):
                    yield ast.unparse(node)


def called(call: ast.Call) -> str:
    """Last word of the name of a function."""
    return ast.unparse(call.func).rpartition(".")[2]


def is_constant(word: ast.expr) -> bool:
    """Return True for the name of a constant, with or without its module."""
    return (
        isinstance(word, ast.Constant)
        and isinstance(word.value, str)
        and CONSTANT.fullmatch(word.value.rpartition(".")[2]) is not None
    )


def is_computed(call: ast.Call, ours: set[str]) -> bool:
    """Return True if something imported from us gets an attribute that a variable names."""
    match call.args[:2]:
        case [ast.Name(id=target), name]:
            return target in ours and not isinstance(name, ast.Constant)
    return False


def test_no_test_replaces_a_constant_of_a_module() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): calls
        for path in sorted(ROOT.rglob("*.py"))
        if (calls := list(patches(path.read_text()))) and path != Path(__file__)
    }
    assert not found, "give the value: an argument, or a field of the room's limits"


@pytest.mark.parametrize(
    "source",
    [
        "monkeypatch.setattr(module, 'RETRY_S', 0.1)",
        "monkeypatch.setattr('prfaas.pool.module.RETRY_S', 0.1)",
        "monkeypatch.setattr(module, '_PACKAGE', 'none', raising=False)",
        "monkeypatch.delattr(module, 'RETRY_S')",
        "with pytest.MonkeyPatch.context() as patch:\n    patch.setattr(module, 'SLICE', 1)",
        "setattr(module, 'RETRY_S', 0.1)",
        "mock.patch('prfaas.pool.module.RETRY_S', 0.1)",
        "mock.patch.object(module, 'RETRY_S', 0.1)",
        "module.RETRY_S = 0.1",
        "module.RETRY_S: float = 0.1",
        "module.RETRY_S /= 10",
        "from prfaas.pool import module\nmonkeypatch.setattr(module, limit, 0.1)",
    ],
)
def test_a_replaced_constant_is_found(source: str) -> None:
    assert len(list(patches(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "monkeypatch.setattr(module, 'load', fails)",
        "monkeypatch.setattr('os.environ', {})",
        "monkeypatch.setattr(os, name, counting)",
        "RETRY_S = 0.1",
        "limits = module.RETRY_S",
    ],
)
def test_other_replacements_are_left_alone(source: str) -> None:
    assert not list(patches(source))
