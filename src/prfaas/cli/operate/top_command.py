"""`prfaas top`: the console's first page in a terminal."""

from __future__ import annotations

import time
from pathlib import Path

import click

from prfaas.cli.operate.control_client import ControlClient, asks_gateway, operator_key
from prfaas.presentation import console_for


@click.command()
@asks_gateway
@click.option(
    "--interval", type=click.FloatRange(0.2, 60), default=1.0, help="Seconds between two updates."
)
@click.option("--once", is_flag=True, help="Print the state once and exit.")
def top(url: str, key_file: Path | None, interval: float, *, once: bool) -> None:
    """Show the state of a gateway until Ctrl-C: alarms, clusters, links, recent requests.

    \b
    Examples:
      prfaas top
      prfaas top --url http://gateway.example.net:8000 --key-file operator.key
      prfaas top --once
    """
    from rich.live import Live

    from prfaas.cli.operate.top_view import screen

    client = ControlClient(url, operator_key(key_file), root="console/api")
    console = console_for(160)
    if once:
        console.print(screen(client.get("state")))
        return
    try:
        with Live(screen(client.get("state")), console=console, screen=True) as live:
            while True:
                time.sleep(interval)
                live.update(screen(client.get("state")))
    except KeyboardInterrupt:
        pass
