"""Warnings about identities that every peer would refuse."""

import datetime
from collections.abc import Callable
from pathlib import Path

import pytest

from prfaas.wire.certificates import SOON, ends_at, ends_soon, faults
from prfaas.wire.identity import VALID_DAYS, identity_in, make_authority, make_identity

DAY = datetime.timedelta(days=1)


def now() -> datetime.datetime:
    """A time at which fresh identities are valid."""
    return datetime.datetime.now(datetime.UTC)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made_in(tmp_path / "ours")
    return tmp_path / "ours"


def made_in(directory: Path) -> None:
    make_authority(directory)
    for name in ("pd-pool", "gateway"):
        make_identity(directory, name)


def of_another_authority(directory: Path) -> None:
    made_in(directory.parent / "theirs")
    (directory / "ca.pem").write_bytes((directory.parent / "theirs" / "ca.pem").read_bytes())


def of_somebody_else(directory: Path) -> None:
    for end in ("pem", "key"):
        (directory / f"pd-pool.{end}").write_bytes((directory / f"gateway.{end}").read_bytes())


def with_another_key(directory: Path) -> None:
    (directory / "pd-pool.key").write_bytes((directory / "gateway.key").read_bytes())


def garbage(directory: Path) -> None:
    (directory / "pd-pool.pem").write_text("no certificate")


@pytest.mark.parametrize(
    ("spoil", "after", "says"),
    [
        (None, DAY, None),
        (None, -DAY, "set the clock"),
        (None, (VALID_DAYS + 1) * DAY, "pd-pool.pem ended on"),
        (of_another_authority, DAY, "not signed by an authority in"),
        (of_somebody_else, DAY, "is of gateway, and not of pd-pool"),
        (with_another_key, DAY, "cannot be used"),
        (garbage, DAY, "no PEM file"),
    ],
)
def test_what_keeps_an_identity_out_is_said(
    directory: Path,
    spoil: Callable[[Path], None] | None,
    after: datetime.timedelta,
    says: str | None,
) -> None:
    if spoil is not None:
        spoil(directory)
    found = "\n".join(faults(identity_in(directory, "pd-pool"), "pd-pool", now() + after))
    assert (says in found) if says else not found


def test_what_is_not_there_is_somebody_elses_to_say(tmp_path: Path) -> None:
    assert not [*faults(identity_in(tmp_path, "pd-pool"), "pd-pool", now())]
    assert ends_at(identity_in(tmp_path, "pd-pool")) is None


def test_an_end_is_announced(directory: Path) -> None:
    identity = identity_in(directory, "pd-pool")
    end = ends_at(identity)
    assert end is not None
    assert not [*ends_soon(identity, end - SOON - DAY)]
    [line] = ends_soon(identity, end - 3 * DAY)
    assert "in 3 days" in line
    assert not [*ends_soon(identity, end + DAY)]


def test_of_two_authorities_the_one_that_signed_counts(directory: Path) -> None:
    """While an authority is changed, both are in the file."""
    identity = identity_in(directory, "pd-pool")
    made_in(directory.parent / "next")
    following = (directory.parent / "next" / "ca.pem").read_bytes()
    identity.authority.write_bytes(following + identity.authority.read_bytes())
    assert not [*faults(identity, "pd-pool", now())]
