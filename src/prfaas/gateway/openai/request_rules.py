"""Additional allowed fields of one tenant's requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestRules:
    """Set by the operator.

    Attributes:
        fields: Further fields that reach an engine.
        media_domains: Hosts in lower case that engines may fetch media from.
    """

    fields: frozenset[str] = frozenset()
    media_domains: frozenset[str] = frozenset()


STRICT = RequestRules()
"""No additional fields."""
