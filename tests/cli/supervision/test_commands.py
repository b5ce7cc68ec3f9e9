"""The command line: help everywhere, and mistakes in arguments."""

import re
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from prfaas.cli.main import COMMANDS, cli
from tests.cli.conftest import Prfaas


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help_with_examples(command: str) -> None:
    # `-h` is not asked for here: click keeps the help option of a command's first use, and other
    # tests use commands without the group that names it.
    result = CliRunner().invoke(cli, [command, "--help"])
    assert result.exit_code == 0, result.output
    examples = result.output.partition("Examples:")[2].partition("Options:")[0]
    assert f"prfaas {command}" in examples
    for line in examples.splitlines():
        shown = re.sub("`.*?`", "", line).strip()
        assert not re.search(r" prfaas \w", shown), f"an example has a line of its own: {line!r}"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_option_says_what_it_is(command: str) -> None:
    found = cli.get_command(click.Context(cli), command)
    assert found is not None
    for parameter in found.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name


def test_the_command_itself_runs_and_names_its_commands() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "prfaas", "--help"], capture_output=True, text=True, check=True
    )
    assert "Examples:" in result.stdout
    for command in COMMANDS:
        assert f"  {command}" in result.stdout
    assert result.stderr == ""


def test_the_planner_is_loaded_by_those_who_need_it() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from prfaas.cli.main import cli; "
        "CliRunner().invoke(cli, ['--help']); assert 'prfaas.gateway.app' not in sys.modules; "
        "import prfaas.gateway.app, prfaas.pool.node; assert 'scipy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "args",
    [
        ("pool", "--name", "p", "--listen", "nowhere", "--socket", "s", "--identities", "."),
        ("pool", "--name", "p", "--listen", "h:99999", "--socket", "s", "--identities", "."),
        ("pool", "--peer", "no-address"),
        ("gateway", "f.toml", "--engine", "e=ftp://x"),
        ("identity",),
        ("nonsense",),
        ("up",),
    ],
)
def test_wrong_arguments_are_a_mistake(prfaas: Prfaas, args: tuple[str, ...]) -> None:
    code, _, errors = prfaas(*args)
    assert code == 2
    assert "Traceback" not in errors
    assert "Error: " in errors
