"""Parts of self-contained HTML reports: page, table, figure. Every text is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


def page(title: str, style: str, body: Iterable[str]) -> str:
    """A whole document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def figure(plotly_figure: Any, *, first: bool = False) -> str:
    """A figure; the first one of a page brings plotly.js with it, about 4.8 MB."""
    config = {"displayModeBar": False, "responsive": True}
    return str(plotly_figure.to_html(full_html=False, include_plotlyjs=first, config=config))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], css: str = "") -> str:
    """A table of plain texts."""
    header = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<table class="{css}"><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>'
