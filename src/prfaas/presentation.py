"""Tables and pages for people, in the form that all outputs of the planner and simulator share."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from prfaas.errors import ConfigError


def console_for(columns: int) -> Console:
    """Standard output: as wide as its terminal; a given width for a file or a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=columns)


def write_file(option: str, path: Path, text: str) -> None:
    """Write the file that an option names.

    Raises:
        ConfigError: It cannot be written.
    """
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


def html_page(title: str, style: str, body: Iterable[str]) -> str:
    """A whole document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def html_figure(plotly_figure: Any, *, first: bool = False) -> str:
    """A figure; the first one of a page brings plotly.js with it, about 4.8 MB."""
    config = {"displayModeBar": False, "responsive": True}
    return str(plotly_figure.to_html(full_html=False, include_plotlyjs=first, config=config))


def html_table(table: Table, css: str = "") -> str:
    """Cells of a table for a terminal, with its title and caption."""
    title = f"<h3>{escape(str(table.title))}</h3>" if table.title else ""
    caption = f"<small>{escape(str(table.caption))}</small>" if table.caption else ""
    header = "".join(_cell("th", column.header) for column in table.columns)
    rows = zip(*(column.cells for column in table.columns), strict=True)
    body = "".join(f"<tr>{''.join(_cell('td', cell) for cell in row)}</tr>" for row in rows)
    head = f"<thead><tr>{header}</tr></thead>" if table.show_header else ""
    return f'{title}<table class="{css}">{head}<tbody>{body}</tbody></table>{caption}'


def _cell(tag: str, content: object) -> str:
    return f"<{tag}>{escape(str(content).strip())}</{tag}>"
