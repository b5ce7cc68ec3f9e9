"""`prfaas up` and `prfaas check`."""

import click


@click.command()
def up() -> None:
    """Run."""


@click.command()
def check() -> None:
    """Check."""
