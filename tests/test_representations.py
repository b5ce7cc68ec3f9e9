"""Few representations: each fact of a request is stored once, in the classes of the decision."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import prfaas
from prfaas.gateway.telemetry.request_records import RequestRecord

SOURCE = Path(prfaas.__file__).parent
LIVE = ("core", "gateway")
"""Packages that a live request passes."""
PAGE = Path(__file__).parents[1] / "docs" / "decisions" / "0045-one-copy-of-a-fact.md"
ROW = re.compile(r"^\| `(\w+)` \| `([\w/]+\.py)` \|", re.MULTILINE)
"""A row of the tables of classes."""
RECORD = SOURCE / "gateway" / "telemetry" / "request_record.py"


def trees(*packages: str) -> Iterator[tuple[Path, ast.Module]]:
    """All modules of some packages, parsed."""
    for package in packages:
        for file in sorted((SOURCE / package).rglob("*.py")):
            yield file, ast.parse(file.read_text(encoding="utf-8"))


def classes_with(field: str) -> set[str]:
    """Classes on the live path that have a field of this name."""
    return {
        node.name
        for _, tree in trees(*LIVE)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for line in node.body
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and line.target.id == field
    }


def assigned(tree: ast.Module) -> Iterator[ast.Attribute]:
    """Attributes of a record that a module assigns to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            of = node.value
            if getattr(of, "id", getattr(of, "attr", "")) == "record":
                yield node


def test_the_length_of_a_prompt_is_stored_where_it_is_routed_and_where_it_is_recorded() -> None:
    assert classes_with("num_prompt_tokens") == {"Arrival", "RoutingFacts", "RequestRecord"}


def test_the_prefix_that_the_pd_cluster_holds_has_one_meaning() -> None:
    assert classes_with("pd_hit_tokens") == {"RoutingFacts", "RequestRecord"}


def test_the_record_of_a_request_is_written_in_one_place() -> None:
    names = {field.name for field in fields(RequestRecord)}
    elsewhere = [
        f"{file.relative_to(SOURCE)}:{node.lineno} {node.attr}"
        for file, tree in trees("gateway")
        if file != RECORD
        for node in assigned(tree)
        if node.attr in names
    ]

    assert not elsewhere, "write it by a method of RequestRecord that is named after what happened"


def test_the_state_of_a_link_is_described_once_for_every_decision() -> None:
    assert classes_with("backlog_bytes") == {"LinkState"}
    assert classes_with("link_backlog_bytes") == set()


def test_every_class_of_the_tables_is_where_they_say() -> None:
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    missing = []
    for name, module in rows:
        tree = ast.parse((SOURCE / module).read_text(encoding="utf-8"))
        if name not in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}:
            missing.append(f"{module}: {name}")

    assert len(rows) > 20
    assert not missing
