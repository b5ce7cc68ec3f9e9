"""Consoles of commands."""

from __future__ import annotations

from rich.console import Console


def console_for(columns: int) -> Console:
    """Standard output: as wide as its terminal, or so many columns of a file or a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=columns)
