"""The `[supervision]` table of a deployment file."""

from __future__ import annotations

from pydantic import Field, field_validator

from prfaas.config.quantities import DurationNs, long_enough
from prfaas.config.table import Table


class SupervisionTable(Table):
    """`[supervision]`: how `prfaas up` treats a part that fails."""

    start_timeout: DurationNs | None = None
    """A part that is not ready this long after its start is ended, and with `--restart` tried
    again. Without it: 30 minutes for vLLM's engines, two minutes for everything else."""
    restarts_max: int = Field(default=10, ge=0, le=1000)
    """Failures in a row after which `--restart` gives a part up; being ready for two minutes starts
    the count anew."""
    delay_max: DurationNs = 60 * 10**9
    """Longest wait between two starts of a part: the first is a second, each further one twice the
    one before, and half of each is left to chance."""

    _limits = field_validator("start_timeout", "delay_max")(long_enough)
