"""Azure's public traces of LLM inference: instants and lengths, no prefixes.

Cite Patel et al., Splitwise, ISCA 2024, with results from them.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from prfaas.sim.workloads.reading import read_lines, refuse
from prfaas.sim.workloads.trace import Row, check_lengths, collect
from prfaas.units import NS_PER_S

COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


def read_azure(path: Path) -> tuple[Row, ...]:
    """A trace of AzurePublicDataset's `AzureLLMInferenceTrace`; the first request comes at 0.

    Args:
        path: CSV, gzipped or not, with the columns TIMESTAMP, ContextTokens, GeneratedTokens.

    Raises:
        ConfigError: The file or a line of it is wrong.
    """
    return collect(path, _rows(path))


def _rows(path: Path) -> Iterator[Row]:
    first_ns: int | None = None
    for number, cells in _cells(path):
        at_ns = _instant_ns(path, number, cells[0])
        first_ns = at_ns if first_ns is None else first_ns
        if at_ns < first_ns:
            refuse(path, number, f"{COLUMNS[0]} {cells[0]!r} lies before that of the first request")
        prompt, output = (_whole(path, number, i, cells[i]) for i in (1, 2))
        check_lengths(path, number, (COLUMNS[1], prompt), (COLUMNS[2], output))
        yield Row(at_ns - first_ns, prompt, max(output, 1))


def _cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    for number, line in read_lines(path):
        cells = next(csv.reader([line.decode("utf-8", "replace").strip()]))
        if number == 1:
            if cells != COLUMNS:
                refuse(path, 1, f"columns {cells[:8]}; expected {COLUMNS}")
        elif len(cells) != len(COLUMNS):
            refuse(path, number, f"{len(cells)} values; expected {', '.join(COLUMNS)}")
        else:
            yield number, cells


def _instant_ns(path: Path, number: int, text: str) -> int:
    """Seconds are exact; of their fraction up to nine digits count."""
    whole, _, fraction = text.partition(".")
    try:
        instant = datetime.fromisoformat(whole).replace(tzinfo=UTC)
        return round(instant.timestamp()) * NS_PER_S + int(fraction[:9].ljust(9, "0"))
    except ValueError:
        return refuse(
            path, number, f"{COLUMNS[0]} is {text!r}; expected as in '2023-11-16 18:15:46.6805900'"
        )


def _whole(path: Path, number: int, column: int, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        refuse(path, number, f"{COLUMNS[column]} is {text[:40]!r}; expected a whole number")
    return int(text)
