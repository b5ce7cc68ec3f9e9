"""`prfaas link`: what it says of mistakes."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from prfaas.cli.main import cli
from prfaas.wire.identity import make_authority, make_identity
from tests.ports import free_port

from .conftest import Prfaas, one_line


@pytest.mark.parametrize("command", ["test", "serve"])
def test_the_link_commands_have_help_with_examples(command: str) -> None:
    result = CliRunner().invoke(cli, ["link", command, "--help"])
    assert result.exit_code == 0
    assert "prfaas link" in result.output.partition("Example")[2]


def test_a_link_test_without_identities_says_what_to_give(prfaas: Prfaas) -> None:
    line = one_line(prfaas("link", "test", "prfaas-pool", "pd-pool", "--to", "127.0.0.1:1"))
    assert "--identities" in line


def test_a_link_test_names_a_pool_that_the_file_does_not_have(prfaas: Prfaas, laptop: Path) -> None:
    line = one_line(prfaas("link", "test", "prfaas-pool", "pd-pol", "--file", laptop))
    assert "pd-pol" in line
    assert "pd-pool" in line


def test_a_link_test_needs_an_address_that_stays(prfaas: Prfaas, laptop: Path) -> None:
    line = one_line(prfaas("link", "test", "prfaas-pool", "pd-pool", "--file", laptop))
    assert "--to" in line


@pytest.mark.parametrize("counts", ["0", "17", "1,x", "", "1.5"])
def test_numbers_of_connections_are_checked(prfaas: Prfaas, counts: str) -> None:
    code, _, errors = prfaas("link", "test", "a", "b", "--connections", counts)
    assert code == 2
    assert "numbers from 1 to 16" in errors


def test_a_link_test_against_nobody_is_one_line(prfaas: Prfaas, tmp_path: Path) -> None:
    make_authority(tmp_path)
    make_identity(tmp_path, "prfaas-pool")
    place = f"127.0.0.1:{free_port()}"
    where = ("--to", place, "--identities", tmp_path)
    code, _, errors = prfaas("link", "test", "prfaas-pool", "pd-pool", *where)
    assert code == 1
    assert errors.startswith(f"prfaas: no link test with pd-pool at {place}")
    assert errors.count("\n") == 1
