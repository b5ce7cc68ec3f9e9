"""`[classes.CLASS]`: classes of service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, field_validator

from prfaas.config.quantities import DurationNs, long_enough
from prfaas.config.table import Table
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
    """See that classes can be served, and that tenants have classes that exist.

    Raises:
        ValueError: One has not.
    """
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
