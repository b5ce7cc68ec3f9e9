"""Tables, plots and pages for people, in the form that planner and simulator share.

A page is what a wide terminal shows, so that nothing is rendered twice.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from prfaas.errors import ConfigError

PAGE_COLUMNS = 160
PLOT_ROWS = 16
Line = tuple[str, Sequence[float], Sequence[float]]
"""Name, and coordinates of a line."""


def console_for(columns: int) -> Console:
    """Standard output: as wide as its terminal; a given width for a file or a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=columns)


def write_file(option: str, path: Path, text: str) -> None:
    """Write the file that an option names; ConfigError if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}") from None


def plain_table(title: str, *columns: str, padding: int = 2) -> Table:
    """A table without lines for a terminal; the first column is left-justified."""
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        header_style="dim",
        box=None,
        padding=(0, padding, 0, 0),
    )
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", vertical="bottom")
    return table


def recorded_page(show: Callable[[Console], None]) -> str:
    """Output of a wide terminal, as one HTML page that fetches nothing."""
    console = Console(
        record=True, file=io.StringIO(), width=PAGE_COLUMNS, force_terminal=True, highlight=False
    )
    show(console)
    return console.export_html(inline_styles=True)


def plot(title: str, x_label: str, lines: Iterable[Line], columns: int) -> Text:
    """Lines over one axis, as text; those without points are left out."""
    import plotext

    # plotext has one figure for the whole process, which is cleared first.
    plotext.terminal.limit(False, False)
    figure = plotext.figure
    figure.clear()
    figure.plot_size(columns, PLOT_ROWS)
    figure.title(title)
    figure.label(x_label, "x")
    figure.legend(x=columns - 8, y=0, ha="right", va="top")
    for name, x, y in lines:
        if len(x):
            points = figure.signal(list(x), list(y))
            points.lines()
            points.label(name)
            figure.draw(points)
    return Text.from_ansi(str(figure.build().string()))
