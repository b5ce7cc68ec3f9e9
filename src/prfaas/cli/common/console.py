"""Consoles of commands."""

from __future__ import annotations

from rich.console import Console


def console_for(columns: int) -> Console:
    """Standard output: as wide as its terminal; a given width for a file or a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=columns)
