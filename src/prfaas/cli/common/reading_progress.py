"""A bar for the bytes of a file, or of a folder's files, that were read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from prfaas.traces.lines import OnProgress


@contextmanager
def reading(path: Path, num_bytes: int | None = None) -> Iterator[OnProgress]:
    """Show a bar on a terminal while a file is read; elsewhere nothing.

    Args:
        path: The file, or a folder.
        num_bytes: Size of what is read; that of the file if None.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    total = path.stat().st_size if num_bytes is None and path.is_file() else num_bytes
    console = Console(stderr=True)
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as progress:
        task = progress.add_task(f"reading {escape(path.name)}", total=total)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def reading_bytes(path: Path, num_bytes: int) -> Iterator[OnProgress]:
    """Show the same bar; what is yielded takes the bytes that were read since its last call."""
    done = 0
    with reading(path, num_bytes) as show:

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            show(done)

        yield on_bytes
