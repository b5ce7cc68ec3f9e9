"""One part kept: what is asked for while its process is cleaned up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prfaas.cli.supervision.keeper import Keeper
from prfaas.cli.supervision.restarts import Phase, RestartPolicy


class ScriptedPart:
    """A part without a process."""

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self.num_starts = self.num_stops = 0
        self.on_clean_up: Callable[[], None] = lambda: None
        self.stop_s, self.health_url = 0.0, "http://127.0.0.1:9/"

    def start(self) -> None:
        self.num_starts, self.exit_code = self.num_starts + 1, None

    def terminate(self) -> None:
        self.num_stops, self.exit_code = self.num_stops + 1, -15

    async def clean_up(self) -> None:
        self.on_clean_up()

    def last_error(self) -> str:
        return ""


async def test_a_restart_that_is_asked_for_during_a_clean_up_starts_the_part_once() -> None:
    part: Any = ScriptedPart()
    keeper = Keeper(part, RestartPolicy(True, 10**15), Any, lambda _: None)  # type: ignore[arg-type]
    keeper._probe = lambda: None  # type: ignore[method-assign]
    await keeper._turn()
    part.exit_code, part.on_clean_up = 1, keeper.restart
    for _ in range(3):
        await keeper._turn()
    assert keeper.restarts.phase is Phase.STARTING
    assert (part.num_starts, part.num_stops) == (2, 0)
