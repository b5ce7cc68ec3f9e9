"""Records of `prfaas up`: restarts of parts that a user of this host asked for."""

from __future__ import annotations

import pwd
import socket
import struct

from prometheus_client import CollectorRegistry

from prfaas.audit.metrics import AuditMetrics
from prfaas.audit.settings import AuditSettings
from prfaas.audit.writer import AuditLog
from prfaas.core.audit.records import RecordKind

NAME = "prfaas-up"
"""Name of the log."""
_CREDENTIALS = struct.Struct("3i")


class UpAudit:
    """Writes the records of one `prfaas up`; ConfigError if the log cannot be written.

    Args:
        settings: None without an audit log; then nothing is recorded.
    """

    def __init__(self, settings: AuditSettings | None) -> None:
        self._log: AuditLog | None = None
        if settings is not None:
            self._log = AuditLog(settings, NAME, AuditMetrics(CollectorRegistry(), "up"))

    @property
    def accepts(self) -> bool:
        """False while nothing may be changed, since the log cannot be written."""
        return self._log is None or self._log.accepts

    async def restarted(self, operator: str, part: str) -> None:
        """Record the restart of a part."""
        if self._log is not None:
            record = {"operator": operator, "action": "restart", "what": f"part {part}"}
            self._log.write({"kind": RecordKind.OPERATOR, **record})
            await self._log.written()

    def close(self) -> None:
        """End the log. Blocks for as long as the disk takes."""
        if self._log is not None:
            self._log.close()


def user_of(connection: socket.socket) -> str:
    """The user at the other end of a unix socket, as the kernel knows it: `unix:NAME`."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid = _CREDENTIALS.unpack(data)[1]
    try:
        return f"unix:{pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"unix:{uid}"
