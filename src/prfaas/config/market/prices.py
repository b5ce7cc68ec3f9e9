"""`[prices.CLUSTER]`: prices of a cluster and its link; `[classes.CLASS]`: classes of service."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Annotated

from pydantic import Field, StringConstraints, field_validator, model_validator

from prfaas.config.quantities import DurationNs, Table, long_enough
from prfaas.config.tenants import TenantTable
from prfaas.core.codec.codecs import Quality

CLASSES_MAX = 32
RESERVED = ("auto", "default")
"""Values of OpenAI's `service_tier` that stand for the tenant's own class."""


class ClassTable(Table):
    """`[classes.CLASS]`: a class of service."""

    ttft: DurationNs | None = None
    """Target of the time to first token. Requests that are predicted to miss it are refused with
    429. `routing.ttft_max` if absent."""
    second_price: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] | None = None
    """Value of a second of a request's time, for the policy "cost"; `routing.second_price` if
    absent."""
    priority: int = Field(default=0, ge=-100, le=100)
    """Order of admission: while requests of a higher priority are refused or wait, those of a lower
    one are refused earlier and wait longer."""
    quality: Annotated[Quality, Field(strict=False)] | None = None
    """Quality class of the KV blocks of its requests; that of the tenant if absent."""

    _limits = field_validator("ttft")(long_enough)


def check_classes(
    classes: Mapping[str, ClassTable], tenants: Mapping[str, TenantTable], *, has_plan: bool
) -> None:
    """See that classes can be served, and that tenants have classes that exist; ValueError if one
    has not."""
    for name, service in classes.items():
        if service.ttft is not None and not has_plan:
            raise ValueError(
                f"classes.{name}.ttft needs a plan: without profiles nothing is predicted"
            )
    for name in RESERVED:
        if name in classes:
            raise ValueError(
                f'classes.{name}: requests with service_tier = "{name}" get the class of their '
                "tenant; choose another name"
            )
    known = ", ".join(classes) or "none"
    for tenant, table in tenants.items():
        for key, wanted in (
            ("service_tier", [table.service_tier] if table.service_tier else []),
            ("service_tiers", table.service_tiers),
        ):
            for name in wanted:
                if name not in classes:
                    raise ValueError(
                        f"tenants.{tenant}.{key}: there is no class {name!r}; [classes] has {known}"
                    )


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
    """See that prices are those of clusters that exist; ValueError if one is not."""
    for name in prices:
        if name not in clusters:
            raise ValueError(
                f"{place}.{name}: there is no cluster of that name; there are {', '.join(clusters)}"
            )
