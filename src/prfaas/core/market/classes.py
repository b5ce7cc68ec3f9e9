"""Classes of service: what a request's time is worth, and how long it may take."""

from __future__ import annotations

from typing import NamedTuple

from prfaas.core.codec.codecs import Quality
from prfaas.core.market.choice import RequestTerms


class ServiceClass(NamedTuple):
    """A class of service."""

    name: str
    ttft_max_ns: int | None = None
    """Target of the time to first token; None is the deployment's."""
    second_price: float | None = None
    """Value of a second of a request's time; None is the deployment's."""
    priority: int = 0
    """Requests of a higher one are admitted first."""
    quality: Quality | None = None
    """Quality class of its blocks; None is the tenant's."""


def terms_of(service: ServiceClass | None, usual: RequestTerms) -> RequestTerms:
    """Terms of a request by its class; what the class leaves out is the deployment's."""
    if service is None:
        return usual
    price, target_ns = service.second_price, service.ttft_max_ns
    return RequestTerms(
        usual.second_price if price is None else price,
        usual.ttft_max_ns if target_ns is None else target_ns,
    )
