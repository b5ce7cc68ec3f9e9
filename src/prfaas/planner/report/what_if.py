"""The planner behind the sliders: the code of `prfaas plan`, in a process of its own."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib import resources
from pathlib import Path
from typing import Any

from prfaas.errors import ConfigError, RequestError

SETTINGS_MAX = 16
SETTING_CHARS_MAX = 80
WAITING_MAX = 8
"""Questions that wait; more are refused, for every one takes some milliseconds of a core."""

CASE_STUDY = Path(str(resources.files("prfaas.planner").joinpath("data", "case-study.toml")))
_ALLOWED = {
    "pd.instances": "count",
    "pd.price_per_gpu_hour": "number",
    "prfaas.0.instances": "count",
    "prfaas.0.price_per_gpu_hour": "number",
    "prfaas.0.link.bandwidth": "rate",
    "prfaas.0.link.rtt": "duration",
    "prfaas.0.link.price_per_tb": "number",
    "workload.mu": "number",
    "workload.sigma": "number",
    "workload.output_tokens": "number",
    "workload.prefix_hit_ratio": "number",
    "search.threshold": "number",
}
"""Inputs that a question can change, with their unit: bit/s, seconds, or none."""


class WhatIf:
    """Answers questions about one plan file.

    Args:
        plan: The deployment's plan; None takes the paper's case study, which ships with prfaas.
    """

    def __init__(self, plan: Path | None) -> None:
        self._plan = plan
        self._pool: ProcessPoolExecutor | None = None
        self._num_waiting = 0

    async def answer(self, settings: Mapping[str, object]) -> dict[str, Any]:
        """The plan with some settings changed.

        Args:
            settings: Plan-file settings by dotted name, such as {"pd.instances": 6}.

        Raises:
            RequestError: 400, a setting is unknown or impossible; 429, too many questions wait.
        """
        overrides = overrides_of(settings)
        if self._num_waiting >= WAITING_MAX:
            raise RequestError(
                f"{WAITING_MAX} planner questions wait, which is the limit; try again", status=429
            )
        self._num_waiting += 1
        try:
            return await self._run(overrides)
        except ConfigError as error:
            raise RequestError(str(error)) from None
        except BrokenProcessPool:
            self.close()
            raise RequestError("the planner's process ended; try again", status=503) from None
        finally:
            self._num_waiting -= 1

    async def _run(self, overrides: list[str]) -> dict[str, Any]:
        if self._pool is None:
            # Spawned, not forked: the gateway has threads.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                1, mp_context=context, initializer=end_with_the_gateway
            )
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, answer, self._plan, overrides)

    def close(self) -> None:
        """End the planner's process."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def end_with_the_gateway() -> None:
    """End this process with its parent, for any end of the parent."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="gateway-watch", daemon=True).start()


def overrides_of(settings: Mapping[str, object]) -> list[str]:
    """Settings as `prfaas plan --set` takes them; RequestError (400) if a setting is unknown or no
    finite number."""
    if len(settings) > SETTINGS_MAX:
        raise RequestError(f"{len(settings)} settings; {SETTINGS_MAX} are the limit")
    found = []
    for name, value in settings.items():
        if name not in _ALLOWED:
            known = ", ".join(_ALLOWED)
            raise RequestError(
                f"setting {name[:SETTING_CHARS_MAX]!r} is not one of {known}", param="settings"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise RequestError(f"{name} has to be a finite number", param="settings")
        found.append(f"{name}={_toml(value, _ALLOWED[name])}")
    return found


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # JSON has integers beyond the range of a float.
        return False


def _toml(value: float, unit: str) -> str:
    match unit:
        case "count":
            return str(round(value))
        case "rate":
            return f'"{value:.0f}bps"'
        case "duration":
            return f'"{value * 1e3:.6f}ms"'
        case _:
            return repr(float(value))


def answer(plan: Path | None, overrides: list[str]) -> dict[str, Any]:
    """Answer one question; runs in the planner's process. See `prfaas.planner.report.json_report`.

    Raises:
        ConfigError: The plan or a setting is wrong.
    """
    from prfaas.planner.report.json_report import interactive

    return {**interactive(plan or CASE_STUDY, overrides), "is_own": plan is not None}
