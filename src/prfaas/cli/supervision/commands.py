"""`prfaas ctl parts` and `prfaas ctl restart`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from prfaas.cli.common.options import PATH
from prfaas.cli.supervision.client import parts_of, restart_part, running_state
from prfaas.config.load import load_deployment

Command = TypeVar("Command", bound=Callable[..., None])


def _of_a_deployment(command: Command) -> Command:
    """Adds `--file` and `--json` to a command."""
    file = click.option(
        "--file",
        type=PATH,
        help="Its deployment file; if absent, the only one that runs from this directory.",
    )
    as_json = click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
    return file(as_json(command))


@click.command()
@_of_a_deployment
def parts(file: Path | None, *, as_json: bool) -> None:
    """Show the parts that `prfaas up` runs on this machine, and their failures.

    Asks `prfaas up` over a socket in the `state` directory, so it works while the gateway is down.
    Exit code 1 if a part is not ready.

    \b
    Examples:
      prfaas ctl parts
      prfaas ctl parts --file two-sites.toml --json
    """
    found = parts_of(_state(file))
    _show(found, as_json=as_json)
    if any(part["phase"] != "ready" for part in found):
        click.get_current_context().exit(1)


@click.command()
@click.argument("part")
@_of_a_deployment
def restart(part: str, file: Path | None, *, as_json: bool) -> None:
    """Restart PART of a running `prfaas up`, in any phase.

    It is stopped as by Ctrl-C. All other parts keep running. `prfaas ctl parts` shows when
    it is ready.

    \b
    Examples:
      prfaas ctl restart pd-engine
      prfaas ctl restart gateway --file two-sites.toml
    """
    _show(restart_part(_state(file), part), as_json=as_json)


def _state(file: Path | None) -> Path:
    return running_state() if file is None else load_deployment(file).state


def _show(found: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"parts": found}, indent=2))
        return
    for part in found:
        click.echo(_line(part))


def _line(part: dict[str, Any]) -> str:
    line = f"{part['kind']:<14} {part['name']:<20} {part['phase']:<10}"
    if part["due_in_s"] is not None:
        line += f" starts in {part['due_in_s']:.0f} s"
    if part["phase"] != "ready" and part["reason"]:
        line += f" {part['reason']}"
    elif part["phase"] == "ready":
        line += f" {', '.join(part['places'].values())}"
    return line.rstrip()
