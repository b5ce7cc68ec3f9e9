"""The requests of the demos, and their table: one row per request.

The documents are this package's own sources and their comments: real text that every installation
has. With the demo's tokenizer a byte is a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

import prfaas
from prfaas.units import format_size

PACKAGE = Path(prfaas.__file__).parent


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """One turn."""

    title: str
    text: str
    """Message of the user."""
    follows: int | None = None
    """Index of the request whose conversation it continues; None for a new one."""


def document(name: str, num_chars: int) -> str:
    """The first `num_chars` characters of a source file, or of all files of a folder."""
    path = PACKAGE / name
    files = sorted(path.glob("*.py")) if path.is_dir() else [path]
    return "\n".join(file.read_text() for file in files)[:num_chars]


def demo_requests() -> list[DemoRequest]:
    """The requests, in the order they are sent."""
    chat = (
        "We serve a chat model from two datacenters. Long prompts make the first token late, and "
        "while one is prefilled everybody else's answers stutter. What could we do about it "
        "without buying more accelerators for the site that decodes?"
    )
    return [
        DemoRequest("chat: late first tokens", chat),
        DemoRequest(
            "document of 2K", f"Review this.\n\n{document('core/routing/decision.py', 2200)}"
        ),
        DemoRequest("chat: goes on", "Is Ethernet between the two sites enough for that?", 0),
        DemoRequest("document of 6K", f"Explain this.\n\n{document('wire/identity.py', 6000)}"),
        DemoRequest("  a question on it", "Which of these files may other users read?", 3),
        DemoRequest("chat: thresholds", f"{chat} And how long is long? Please be specific."),
        DemoRequest("document of 12K", f"Find the bug.\n\n{document('pool/receive', 12000)}"),
        DemoRequest("chat: caches", "What does a prefix cache keep of a linear-attention layer?"),
        DemoRequest(
            "document of 4K", f"Shorten this.\n\n{document('core/kv/prefix_index.py', 4000)}"
        ),
        DemoRequest(
            "  a question on the 12K", "And is it safe when a peer lies about its name?", 6
        ),
        DemoRequest("document of 9K", f"Summarise this.\n\n{document('wire/messages', 9000)}"),
        DemoRequest("chat: thanks", "Thank you, that was helpful. One sentence to sum it up?", 5),
    ]


def timing_requests() -> list[DemoRequest]:
    """The requests of the demo with timing engines, whose threshold is 19,400 tokens."""
    chat = "Long prompts make the first token late. What could we do about it?"
    return [
        DemoRequest("chat", chat),
        DemoRequest("document of 8K", f"Review this.\n\n{document('core/routing', 8000)}"),
        DemoRequest("document of 32K", f"Explain this.\n\n{document('gateway/serving', 32000)}"),
        DemoRequest("  a question on it", "Which of these functions can fail?", 2),
        DemoRequest("document of 64K", f"Find the bug.\n\n{document('core/request', 64000)}"),
        DemoRequest("chat: goes on", "Is Ethernet between the two sites enough for that?", 0),
        DemoRequest("document of 100K", f"Sum this up.\n\n{document('core/transfer', 100_000)}"),
        DemoRequest("  a question on it", "And is it safe when a peer lies about its name?", 6),
        DemoRequest("document of 24K", f"Shorten this.\n\n{document('core/kv', 24000)}"),
        DemoRequest("chat: thanks", "Thank you. One sentence to sum it up?", 5),
    ]


JsonObject = dict[str, Any]
WORDS_FROM = 145
"""Width of a terminal, columns, that fits reasons as text."""


@dataclass(slots=True)
class DemoRow:
    """One request of the demo, and what became of it."""

    request: DemoRequest
    messages: list[JsonObject]
    """The conversation that was sent."""
    answer: str = ""
    record: JsonObject = field(default_factory=dict)
    """The gateway's record of it; empty while it runs."""
    alone: str | None = None
    """Answer of one engine alone that computes the whole prompt; None before it was asked."""
    again: str | None = None
    """The same engine's answer when it finds the prompt's prefix in its own cache."""
    if_local_ms: float | None = None
    """Time of a local prefill, milliseconds; None if it is not known."""

    @property
    def is_identical(self) -> bool:
        """Return True if one engine alone gave the same answer, having computed all of it."""
        return self.alone == self.answer

    @property
    def is_as_cached(self) -> bool:
        """Return True if one engine alone gave the same answer with its own prefix cache.

        That is what a hand-off is. Computing a prompt in other pieces may round otherwise, and
        choose another token where two are as likely: in vLLM's own prefix hits, too.
        """
        return self.again == self.answer


@dataclass(frozen=True, slots=True)
class _Column:
    """A column: its name, and its cell of a finished request at a terminal width."""

    name: str
    cell: Callable[[DemoRow, int], str]
    justify: JustifyMethod = "right"


def _path(row: DemoRow, _: int) -> str:
    if row.record.get("fallback"):
        return "fell back"
    return "[cyan]REMOTE[/]" if _is_remote(row) else "local"


def _why(row: DemoRow, width: int) -> str:
    words: str = row.record["explanation" if width >= WORDS_FROM else "reason"]
    fallback = row.record.get("fallback")
    return f"{fallback['stage']} {fallback['reason']}; {words}" if fallback else words


def _is_remote(row: DemoRow) -> bool:
    return bool(row.record["path"] == "remote")


def _milliseconds(key: str) -> Callable[[DemoRow, int], str]:
    return lambda row, _: f"{row.record[key]:.0f} ms" if row.record.get(key) else ""


def _shipped(row: DemoRow, _: int) -> str:
    return format_size(row.record["kv_bytes"]) if _is_remote(row) else ""


def _alone(row: DemoRow, _: int) -> str:
    if row.alone is None:
        return ""
    if row.is_identical:
        return "identical"
    return "as cached" if row.is_as_cached else "[red]DIFFERS[/]"


def _if_local(row: DemoRow, _: int) -> str:
    return f"{row.if_local_ms:.0f} ms" if _is_remote(row) and row.if_local_ms else ""


_WHY = "why"
_COLUMNS = (
    _Column("prompt", lambda row, _: f"{row.record['num_prompt_tokens']:,}"),
    _Column("cached", lambda row, _: f"{row.record['cached_tokens'] or 0:,}"),
    _Column("new", lambda row, _: f"{row.record['num_new_tokens']:,}"),
    _Column("path", _path, "left"),
    _Column(_WHY, _why, "left"),
    _Column("KV shipped", _shipped),
    _Column("transfer", _milliseconds("transfer_ms")),
    _Column("TTFT", _milliseconds("ttft_ms")),
    _Column("2nd token", _milliseconds("second_ms")),
)
COMPARED, IF_LOCAL = _Column("as alone", _alone, "left"), _Column("if local", _if_local)
"""The last column: the answer beside that of one engine alone, or the first token's time there."""
_LEAVE = ("2nd token", "transfer", "cached", "prompt", _WHY, "KV shipped", "TTFT", "new")
"""Columns that are dropped, in this order, in a narrow terminal; path and comparison stay."""
_GAP = 2
_TITLE_MIN, _WHY_MIN = 12, 18


def table_of(rows: list[DemoRow], width: int, last: _Column = COMPARED) -> Table:
    """The table for a terminal width, columns.

    Where a request went and the last column are shown at every width: other columns leave first,
    and titles and reasons are cut.
    """
    shown = [*_COLUMNS, last]
    cells = _cells(shown, rows, width)
    wide = {name: _widest(name, found) for name, found in cells.items()}
    leaving = iter(_LEAVE)
    while (room := _room(shown, wide, width)) < 0 and (name := next(leaving, None)):
        shown = [column for column in shown if column.name != name]
    title = max([len("request"), *(len(row.request.title) + 2 for row in rows)])
    has_why = any(column.name == _WHY for column in shown)
    title = min(title, max(_TITLE_MIN, room + _TITLE_MIN))
    wide[_WHY] = max(_WHY_MIN, room + _WHY_MIN + _TITLE_MIN - title) if has_why else 0
    table = Table(box=None, padding=(0, _GAP // 2), header_style="bold")
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("request", no_wrap=True, max_width=title)
    for column in shown:
        table.add_column(
            column.name, justify=column.justify, no_wrap=True, max_width=wide[column.name]
        )
    for number, row in enumerate(rows):
        words = row.request.title if row.record else f"{row.request.title} …"
        table.add_row(str(number + 1), words, *(cells[c.name][number] for c in shown))
    return table


def _cells(columns: list[_Column], rows: list[DemoRow], width: int) -> dict[str, list[str]]:
    """Cells of every column, by its name."""
    return {
        column.name: [column.cell(row, width) if row.record else "" for row in rows]
        for column in columns
    }


def _widest(name: str, cells: list[str]) -> int:
    return max(len(name), *(len(Text.from_markup(cell).plain) for cell in cells), 0)


def _room(shown: list[_Column], wide: dict[str, int], width: int) -> int:
    """Columns of the terminal that are left for longer titles and reasons; negative for none."""
    needed = [_WHY_MIN if column.name == _WHY else wide[column.name] for column in shown]
    return width - sum(each + _GAP for each in (*needed, len("12"), _TITLE_MIN))
