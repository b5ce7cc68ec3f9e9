"""Single settings of a file, changed on the command line: `--set pd.instances=10`."""

from __future__ import annotations

import tomllib
from typing import Any

from prfaas.errors import ConfigError


def override(tables: dict[str, Any], setting: str) -> None:
    """Apply one "a.b=value" to tables in place; the value is TOML or plain text.

    Raises:
        ConfigError: The setting has no value, or its key leads nowhere.
    """
    name, separator, text = setting.partition("=")
    steps = name.strip().split(".")
    if not separator or not all(steps):
        raise ConfigError(f'--set {setting!r}: expected key=value, as in "pd.instances=10"')
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    target: Any = tables
    for step in steps[:-1]:
        target = _step_into(target, step, setting)
    if isinstance(target, list):
        raise ConfigError(f"--set {setting!r}: name an item by its index, as in {steps[0]}.0.name")
    target[steps[-1]] = value


def _step_into(target: Any, step: str, setting: str) -> Any:
    if isinstance(target, list):
        if not step.isdecimal() or int(step) >= len(target):
            raise ConfigError(
                f"--set {setting!r}: {step!r} is not an index below {len(target)}; items are "
                "counted from 0"
            )
        return target[int(step)]
    inner = target.setdefault(step, {})
    if not isinstance(inner, dict | list):
        raise ConfigError(f"--set {setting!r}: {step!r} is a value, not a table")
    return inner
