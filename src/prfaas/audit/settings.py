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
    """Files and intervals.

    Attributes:
        folder: Directory of the files.
        keys: Directory of NAME.key, the signing key; created if absent.
        rotate_bytes: Size from which a new file is begun.
        keep: Files that are kept; 0 keeps all.
        on_full: Behaviour while the log cannot be written.
        checkpoint_lines: Lines after which a checkpoint is due.
        checkpoint_s: Time after which one is due if there are new lines, seconds.
        queue_max: Records that wait while the log cannot be written; more are lost and counted.
        retry_s: Wait before a log that could not be written is tried again, seconds.
    """

    folder: Path
    keys: Path
    rotate_bytes: int = 64 << 20
    keep: int = 0
    on_full: OnFull = OnFull.OPEN
    checkpoint_lines: int = 1000
    checkpoint_s: float = 10.0
    queue_max: int = 20_000
    retry_s: float = 1.0

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
