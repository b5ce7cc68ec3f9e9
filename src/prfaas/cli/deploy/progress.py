"""Showing how far the start of a deployment is."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from prfaas.cli.host.processes import ProcessPart
from prfaas.cli.supervision.keeper import PartChange, Phase, line_of


class StartProgress:
    """A table of parts, live on a terminal, one line an event elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began: dict[str, float] = {}
        self._parts: list[ProcessPart] = []
        self._spinner = Spinner("dots")
        self._live = Live(
            get_renderable=self._table, console=console, refresh_per_second=8, transient=True
        )

    def __enter__(self) -> StartProgress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def show(self, change: PartChange) -> None:
        """A part was started, is ready, or has failed."""
        part = change.part
        if part not in self._parts:
            self._parts.append(part)
        if change.phase is Phase.STARTING:
            self._began[part.name] = time.monotonic()
            if not self._console.is_terminal:
                self._console.print(f"{part.kind:<10} {part.name:<16} starting")
        elif change.phase is Phase.READY:
            self._console.print(
                f"{part.kind:<10} {part.name:<16} ready {part.ready_after_s or 0.0:5.1f} s"
            )
        else:
            self._console.print(line_of(change), markup=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for part in self._parts:
            if part.ready_after_s is None and part.name in self._began:
                seconds = time.monotonic() - self._began[part.name]
                table.add_row(part.kind, part.name, self._spinner, f"{seconds:.0f} s")
        return table
