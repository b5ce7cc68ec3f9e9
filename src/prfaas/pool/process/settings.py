"""Settings of a pool node with its annexes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prfaas.audit.settings import AuditSettings
from prfaas.pool.node.settings import PoolSettings
from prfaas.pool.shared.settings import SharedSettings


@dataclass(frozen=True, slots=True)
class PoolProcessSettings(PoolSettings):
    """Settings of a pool node and of its annexes.

    Attributes:
        shared: Tier that pool nodes of the site share; None without one.
        audit: Audit log; None without.
        contracts: Contracts file of the sites that share this pool node; None without.
        tracing: Collector that takes spans of transfers, as OTLP over HTTP; None sends none.
    """

    shared: SharedSettings | None = None
    audit: AuditSettings | None = None
    contracts: Path | None = None
    tracing: str | None = None

    @property
    def read_limit_s(self) -> float | None:
        """Time limit of all slow reads of one request, seconds; None without a shared tier."""
        return self.shared.read_limit_s if self.shared is not None else None
