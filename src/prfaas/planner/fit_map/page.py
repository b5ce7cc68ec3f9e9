"""The map as one self-contained HTML page that opens without a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from prfaas.planner.fit_map import words
from prfaas.planner.fit_map.make import FitMap, Mix
from prfaas.planner.fit_map.picture import svg
from prfaas.planner.report.html_parts import page, table

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1180px; margin: 2em auto;
       padding: 0 1em; }
svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; margin: .6em 0 1.2em; }
th, td { text-align: right; padding: .3em .7em; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
"""


def html_page(maps: Sequence[FitMap]) -> str:
    """The picture, crossovers and their movers."""
    body = [f"<h1>{escape(words.TITLE)}</h1>", f"<p>{escape(words.LEGEND)}</p>", svg(maps)]
    for found in maps:
        body.append(f"<h2>{escape(found.title)}</h2><p>{escape(words.summary(found))}</p>")
        body += (part for mix in found.mixes for part in _mix(found, mix))
        for title, rows in words.moved_tables(found):
            body += (f"<h3>{escape(title)}</h3>", table(("change", "pays from"), rows))
    return page(words.TITLE, _STYLE, body)


def _mix(found: FitMap, mix: Mix) -> Iterator[str]:
    yield f"<h3>{escape(words.lengths(mix))}: bandwidth from which it pays</h3>"
    head = ("loss", *(f"{rtt_s * 1e3:g} ms" for rtt_s in found.axes.rtt_s))
    rows = [
        (words.loss(loss), *(mix.crossovers[loss, rtt_s].text for rtt_s in found.axes.rtt_s))
        for loss in found.axes.loss
    ]
    yield table(head, rows)
    reasons = [(reason, str(count)) for reason, count in mix.reasons().most_common()]
    if reasons:
        yield table(("not yet proven, because", "points"), reasons)
