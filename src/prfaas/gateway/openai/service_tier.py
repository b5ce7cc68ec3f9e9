"""Classes of service of a tenant: its own, and those that its requests may name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prfaas.config.deployment import Deployment
from prfaas.config.market.prices import RESERVED, ClassTable
from prfaas.config.tenants import TenantTable
from prfaas.core.market.classes import ServiceClass
from prfaas.errors import RequestError

FIELD = "service_tier"


@dataclass(frozen=True, slots=True)
class Services:
    """Classes of service that requests of a tenant may have."""

    usual: ServiceClass | None = None
    """Class of requests that name none; None is that of the deployment."""
    allowed: Mapping[str, ServiceClass] = field(default_factory=dict)
    """Classes that a request may name."""
    is_on: bool = False
    """False where the deployment has no classes: then names are ignored."""

    def named(self, wanted: object) -> ServiceClass | None:
        """The class of a request by its `service_tier`.

        Raises:
            RequestError: 400, there is no such class, or the tenant may not name it.
        """
        if not self.is_on or wanted is None or wanted in RESERVED:
            return self.usual
        found = self.allowed.get(wanted) if isinstance(wanted, str) else None
        if found is None:
            known = ", ".join((*self.allowed, *RESERVED))
            raise RequestError(
                f"{FIELD} {str(wanted)[:80]!r} is unknown, or not allowed with this key; it may "
                f"be: {known}",
                param=FIELD,
            )
        return found


NO_SERVICES = Services()


def services_of(deployment: Deployment, table: TenantTable | None = None) -> Services:
    """Classes of a tenant; without tenants, requests may name all."""
    classes = {name: _service(name, each) for name, each in deployment.classes.items()}
    if table is None:
        return Services(None, classes, bool(classes))
    names = [*([table.service_tier] if table.service_tier else []), *table.service_tiers]
    usual = classes.get(table.service_tier or "")
    return Services(usual, {name: classes[name] for name in names}, bool(classes))


def _service(name: str, table: ClassTable) -> ServiceClass:
    return ServiceClass(name, table.ttft, table.second_price, table.priority, table.quality)
