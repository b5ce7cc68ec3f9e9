"""Settings of the audit log of one process."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from prfaas.units import NS_PER_S

if TYPE_CHECKING:
    from prfaas.config.services import AuditTable


class OnFull(StrEnum):
    """Behaviour while the log cannot be written."""

    OPEN = "open"
    """Go on; records that do not fit into memory are lost and counted."""
    CLOSED = "closed"
    """Accept no tickets and no changes by operators."""


@dataclass(frozen=True, slots=True)
class AuditSettings:
    """Files and intervals."""

    folder: Path
    """Directory of the files."""
    keys: Path
    """Directory of NAME.key, the signing key; created if absent."""
    rotate_bytes: int = 64 << 20
    """Size from which a new file is begun."""
    keep: int = 0
    """Files that are kept; 0 keeps all."""
    on_full: OnFull = OnFull.OPEN
    """Behaviour while the log cannot be written."""
    checkpoint_lines: int = 1000
    """Lines after which a checkpoint is due."""
    checkpoint_s: float = 10.0
    """Time after which one is due if there are new lines, seconds."""
    queue_max: int = 20_000
    """Records that wait while the log cannot be written; more are lost and counted."""
    retry_s: float = 1.0
    """Wait before a log that could not be written is tried again, seconds."""

    @classmethod
    def of(cls, table: AuditTable | None) -> AuditSettings | None:
        """Settings of a table of the deployment file; None without it."""
        if table is None:
            return None
        return cls(
            table.folder,
            table.keys or table.folder,
            table.rotate,
            table.keep,
            OnFull(table.on_full),
            table.checkpoint_lines,
            table.checkpoint_interval / NS_PER_S,
        )
