"""`[audit]`: the audit log of gateways and pool nodes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from prfaas.config.names import FilePathText
from prfaas.config.quantities import DurationNs, SizeBytes, at_least
from prfaas.config.table import Table
from prfaas.units import format_seconds, format_size

ROTATE_BYTES_MIN = 64 << 10


class AuditTable(Table):
    """`[audit]`: an append-only log of block movements, operators' changes and refusals, one per
    process."""

    folder: FilePathText
    """Directory of the log files, `NAME.000001.jsonl` and on for each process; created if absent.
    """
    keys: FilePathText | None = None
    """Directory with the Ed25519 key `NAME.key` that signs the checkpoints of a process; created
    with mode 0600 if absent. If not set, `folder`: then who can change the log can also sign."""
    rotate: SizeBytes = 64 << 20
    """Size at which a new file begins; the chain continues in it."""
    keep: int = Field(default=0, ge=0, le=1_000_000)
    """Files that are kept; the log records each removal. 0 keeps all."""
    on_full: Literal["open", "closed"] = "open"
    """While the log cannot be written: "open" continues and counts lost records, "closed" refuses
    new transfers and operators' changes until it can."""
    checkpoint_lines: int = Field(default=1000, ge=1, le=1_000_000)
    """Lines after which a signed checkpoint is written."""
    checkpoint_interval: DurationNs = 10 * 10**9
    """Time after which one is written if there are new lines; the file is then synchronised."""

    _rotates = field_validator("rotate")(
        at_least(ROTATE_BYTES_MIN, "hold few lines", "64KiB", format_size)
    )
    _interval = field_validator("checkpoint_interval")(
        at_least(10**8, "would sign all the time", "100ms", format_seconds)
    )
