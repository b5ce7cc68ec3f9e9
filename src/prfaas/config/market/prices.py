"""`[prices.CLUSTER]`: prices of a cluster and of its link."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Annotated

from pydantic import Field, StringConstraints, field_validator, model_validator

from prfaas.config.quantities import DurationNs, long_enough
from prfaas.config.table import Table

STEPS_MAX = 48
TIME_OF_DAY = r"^([01]\d|2[0-3]):[0-5]\d(:[0-5]\d)?$"

Price = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class PriceStep(Table):
    """A price from a time of day on, `{ at = "08:00", price = 3.0 }`."""

    at: Annotated[str, StringConstraints(pattern=TIME_OF_DAY)]
    """Time of day in UTC, "HH:MM" or "HH:MM:SS"."""
    price: Price
    """Price from then on."""

    @property
    def at_s(self) -> int:
        """Seconds since midnight."""
        hours, minutes, seconds = (*map(int, self.at.split(":")), 0)[:3]
        return hours * 3600 + minutes * 60 + seconds


PriceSteps = Annotated[list[PriceStep], Field(min_length=1, max_length=STEPS_MAX)]


class PriceTable(Table):
    """`[prices.CLUSTER]`: prices of a cluster, in one currency throughout."""

    gpu_hour: Price | PriceSteps | None = None
    """Price of one GPU for one hour: a number, or a list of prices by time of day such as
    `[{ at = "08:00", price = 3.0 }, { at = "20:00", price = 1.5 }]`. The plan's if absent."""
    per_tb: Price | PriceSteps | None = None
    """Price of 10**12 bytes on its link to the PD cluster, in the same forms. The plan's if
    absent."""
    gb_hour: Price | PriceSteps | None = None
    """Price of 10**9 bytes of KV blocks in its pool nodes for one hour, in the same forms, for the
    bill. 0 if absent."""
    watts: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0
    """Power of an instance of it while it works, for the energy in the bill; 0 is unknown."""
    revocable: bool = False
    """Its capacity may be revoked: requests that would take longer than `notice` are not sent
    there."""
    notice: DurationNs | None = None
    """Notice before a revocation; needed with `revocable`."""
    leaves_at: datetime.datetime | None = None
    """Time at which its capacity is revoked, with an offset, such as 2026-11-23T18:00:00Z. It gets
    only requests that are predicted to have left it by then."""
    returns_at: datetime.datetime | None = None
    """Time at which it is back; it stays away if absent. Needs `leaves_at`."""

    _notice = field_validator("notice")(long_enough)

    @field_validator("gpu_hour", "per_tb", "gb_hour")
    @classmethod
    def _rises(cls, value: float | list[PriceStep] | None) -> float | list[PriceStep] | None:
        if isinstance(value, list):
            times = [step.at_s for step in value]
            if any(later <= sooner for sooner, later in pairwise(times)):
                shown = ", ".join(step.at for step in value)
                raise ValueError(f"the times {shown} do not rise; sort them, each once")
        return value

    @model_validator(mode="after")
    def _has_notice(self) -> PriceTable:
        if self.revocable != (self.notice is not None):
            raise ValueError("revocable and notice belong together: set both, or neither")
        for name in ("leaves_at", "returns_at"):
            at = getattr(self, name)
            if at is not None and at.tzinfo is None:
                raise ValueError(f"{name}: {at} has no offset from UTC; append Z or +02:00")
        if self.returns_at is not None and (
            self.leaves_at is None or self.returns_at <= self.leaves_at
        ):
            raise ValueError("returns_at needs a leaves_at before it")
        return self


class PriceFile(Table):
    """A price file: tables `[prices.CLUSTER]`."""

    prices: Annotated[dict[str, PriceTable], Field(max_length=1000)]
    """Prices by cluster."""


def check_prices(
    prices: Mapping[str, PriceTable], clusters: Collection[str], place: str = "prices"
) -> None:
    """See that prices are those of clusters that exist.

    Raises:
        ValueError: One is not.
    """
    for name in prices:
        if name not in clusters:
            raise ValueError(
                f"{place}.{name}: there is no cluster of that name; there are {', '.join(clusters)}"
            )
