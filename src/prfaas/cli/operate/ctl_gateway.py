"""A gateway as the commands of `prfaas ctl` see it, and their common options."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from prfaas.cli.operate.control_client import ControlClient, asks_gateway, operator_key
from prfaas.cli.operate.ctl_views import decision_line, joined, purge_lines

PURGE_S = 180.0
Run = TypeVar("Run", bound=Callable[..., None])


class PrintedGateway:
    """A gateway, and how its answers are printed."""

    def __init__(self, client: ControlClient, *, as_json: bool) -> None:
        self.client, self.as_json = client, as_json

    def show(self, found: dict[str, Any], lines: Callable[[dict[str, Any]], list[str]]) -> None:
        """Print an answer."""
        click.echo(json.dumps(found, indent=2) if self.as_json else joined(lines(found)))

    def change(self, *parts: str, **body: object) -> None:
        """Make a change, and print it."""
        self.show(self.client.post(*parts, body=body), _decision_lines)

    def purge(self, target: dict[str, str], *, is_dry: bool, counts_first: bool) -> None:
        """Drop blocks, and print the report; exits with 1 if not all are dropped.

        Args:
            target: What is purged, as fields of the body.
            counts_first: Print on the standard error what will be dropped.
        """
        ask = functools.partial(self.client.post, "purge", limit_s=PURGE_S)
        if counts_first and not is_dry:
            found = ask(body={**target, "dry_run": True})
            click.echo("\n".join(purge_lines(found)), err=True)
        found = ask(body={**target, "dry_run": is_dry})
        self.show(found, purge_lines)
        if not found["is_complete"]:
            sys.exit(1)


def talks(run: Run) -> Run:
    """Options of every command, which it gets as a `PrintedGateway`."""

    @asks_gateway
    @click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
    @functools.wraps(run)
    def connected(*, url: str, key_file: Path | None, as_json: bool, **rest: Any) -> None:
        run(PrintedGateway(ControlClient(url, operator_key(key_file)), as_json=as_json), **rest)

    return connected  # type: ignore[return-value] # click calls it with keywords


def _decision_lines(found: dict[str, Any]) -> list[str]:
    return [decision_line(entry) for entry in found["decisions"]]
