"""Tables, plots and pages for people, in the form that planner and simulator share.

A page is what a wide terminal shows, so that nothing is rendered twice.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from prfaas.errors import ConfigError

PAGE_COLUMNS = 160
PLOT_ROWS = 16
LIGHT = TerminalTheme(
    (255, 255, 255),
    (27, 31, 36),
    [
        *((27, 31, 36), (178, 60, 0), (0, 115, 79), (138, 82, 0)),
        *((0, 95, 152), (122, 82, 199), (0, 110, 120), (89, 99, 110)),
    ],
)
DARK = TerminalTheme(
    (20, 23, 26),
    (230, 233, 236),
    [
        *((154, 164, 175), (255, 122, 61), (44, 191, 145), (230, 159, 0)),
        *((92, 179, 234), (171, 139, 240), (80, 200, 210), (230, 233, 236)),
    ],
)
_PARTING = "<!-- text -->"
_PARTS = "{stylesheet}" + _PARTING + "{code}"
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
:root {{ color-scheme: light dark; }}
body {{ margin: 16px auto; padding: 0 16px; max-width: 1240px; background: #fff; color: #1b1f24;
font: 16px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 20px; }}
pre {{ overflow-x: auto; font: 13px/1.35 ui-monospace, monospace; }}
.verdict:empty {{ display: none; }}
.verdict {{ font-size: 18px; padding: 10px 14px; border-left: 4px solid #00734f;
background: #f5f6f8; }}
{light}
@media (prefers-color-scheme: dark) {{
body {{ background: #14171a; color: #e6e9ec; }}
.verdict {{ background: #1d2126; border-color: #2cbf91; }}
{dark}
}}
</style></head><body><h1>{title}</h1><p class="verdict">{verdict}</p>
<pre tabindex="0"><code>{text}</code></pre></body></html>
"""
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


def recorded_page(show: Callable[[Console], None], title: str = "prfaas", verdict: str = "") -> str:
    """Output of a wide terminal, as one HTML page that fetches nothing, light and dark.

    Args:
        verdict: What stands above all else, and is read on a phone.
    """
    console = Console(
        record=True, file=io.StringIO(), width=PAGE_COLUMNS, force_terminal=True, highlight=False
    )
    show(console)
    # Both have the same classes in the same order.
    (light, text), (dark, _) = (
        console.export_html(theme=theme, code_format=_PARTS, clear=False).split(_PARTING)
        for theme in (LIGHT, DARK)
    )
    return _PAGE.format(
        title=escape(title), verdict=escape(verdict), light=light, dark=dark, text=text
    )


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
