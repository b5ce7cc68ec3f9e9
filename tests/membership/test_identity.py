"""Engines that a member file names: without an identity they get no prompt and no salt."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

import pytest

from prfaas.config.load import load_deployment
from prfaas.core.membership.machine import Join, Membership
from prfaas.core.membership.members import (
    Listed,
    Member,
    MemberKind,
    RefusalCause,
    RefusedEntry,
    Site,
)
from prfaas.membership.entries import site_of
from tests.deployments import LAPTOP

POOL = Listed(Member("pd-pool", MemberKind.POOL, "pd", "10.0.0.1:7100"))
FILES = frozenset({"folder"})


def engine(url: str) -> Listed:
    return Listed(Member("engine", MemberKind.ENGINE, "pd", url, "pd-pool", "both"))


def listed(url: str, source: str = "folder", identified: Set[str] = FILES) -> list[str]:
    """Names that join, and the reasons of refusals."""
    members = Membership(Site({"pd": ("both",)}, "model", identified=identified))
    actions = members.listed(source, [POOL, engine(url)], 1)
    joined = [each.member.name for each in actions if isinstance(each, Join)]
    refused = [row.refusal.reason for row in members.rows() if row.refusal is not None]
    return [*joined, *refused]


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.2:8100",
        "http://attacker.example",
        "http://127.0.0.1.attacker.example:80",
        "http://localhost.attacker.example",
        "http://[2001:db8::1]:8100",
        "http://169.254.169.254",
        "http://0.0.0.0:8100",
    ],
)
def test_an_engine_of_another_machine_without_an_identity_is_refused(url: str) -> None:
    assert listed(url) == ["pd-pool", RefusalCause.NO_IDENTITY]


@pytest.mark.parametrize(
    "url",
    ["https://10.0.0.2:8100", "http://127.0.0.1:8100", "http://localhost:1", "http://[::1]:8100"],
)
def test_one_with_an_identity_or_on_this_machine_joins(url: str) -> None:
    assert listed(url) == ["pd-pool", "engine"]


@pytest.mark.parametrize(
    ("identity", "source", "is_refused"),
    [
        ("files", "folder", True),
        ("files", "kubernetes", False),
        ("all", "folder", True),
        ("all", "kubernetes", True),
        ("none", "folder", False),
        ("", "folder", True),
        ("all", "file", False),
    ],
)
def test_the_setting_names_the_sources(
    tmp_path: Path, identity: str, source: str, *, is_refused: bool
) -> None:
    line = f'identity = "{identity}"\n' if identity else ""
    path = tmp_path / "deployment.toml"
    path.write_text(f'{LAPTOP.read_text()}\n[membership]\nfolder = "{tmp_path}"\n{line}')
    sources = site_of(load_deployment(path)).identified

    names = listed("http://10.0.0.2:8100", source, sources)

    assert (RefusalCause.NO_IDENTITY in names) is is_refused


def test_an_engine_that_loses_its_identity_drains() -> None:
    """A file that is changed: the member that had one leaves, and its successor does not join."""
    members = Membership(Site({"pd": ("both",)}, "model", identified=FILES))
    members.listed("folder", [POOL, engine("https://10.0.0.2:8100")], 1)
    members.listed("folder", [POOL, engine("http://10.0.0.2:8100")], 2)

    refusals = [row.refusal for row in members.rows() if isinstance(row.refusal, RefusedEntry)]

    assert [each.reason for each in refusals] == [RefusalCause.NO_IDENTITY]
    assert "https URL" in refusals[0].words
    assert members.is_draining
