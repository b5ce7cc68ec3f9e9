"""The `[supervision]` table of a deployment file."""

from __future__ import annotations

from pydantic import Field, field_validator

from prfaas.config.quantities import DurationNs, long_enough
from prfaas.config.table import Table


class SupervisionTable(Table):
    """`[supervision]`: how `prfaas up` treats a part that fails."""

    start_timeout: DurationNs | None = None
    """Time limit of the start of a part; it is then stopped, and with `--restart` started again.

    If absent, 30 minutes for vLLM engines, two minutes for other parts.
    """
    restarts_max: int = Field(default=10, ge=0, le=1000)
    """Failures in a row after which `--restart` stops restarting a part; two minutes of readiness
    reset the count."""
    delay_max: DurationNs = 60 * 10**9
    """Longest delay between two starts of a part.

    The first delay is a second, each further one doubles, with a random factor between 0.5 and
    1.
    """

    _limits = field_validator("start_timeout", "delay_max")(long_enough)
