"""Records of a gateway: tickets that it signs, changes by operators, requests without a right."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

from aiohttp import hdrs, web

from prfaas.audit.metrics import AuditMetrics
from prfaas.audit.settings import AuditSettings
from prfaas.audit.writer import AuditLog
from prfaas.core.audit.chain import Fields
from prfaas.core.audit.records import RecordKind, permission
from prfaas.core.audit.refusals import WINDOW_NS, RefusalCounts
from prfaas.core.control.changes import ChangeEntry, Loop
from prfaas.core.transfer.tickets import Ticket
from prfaas.errors import RequestError
from prfaas.units import NS_PER_S

_READS = (hdrs.METH_GET, hdrs.METH_HEAD)
_operator: ContextVar[str] = ContextVar("operator", default="")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class GatewayAudit:
    """Writes the records of one gateway.

    Args:
        settings: None without an audit log; then nothing is recorded.
        metrics: Show the state of the log.

    Raises:
        ConfigError: The log cannot be written.
    """

    def __init__(self, settings: AuditSettings | None, gateway: str, metrics: AuditMetrics) -> None:
        self._log = AuditLog(settings, gateway, metrics) if settings is not None else None
        self._refusals = RefusalCounts()
        self._counting: asyncio.TimerHandle | None = None

    def record(self, fields: Fields) -> None:
        """Write a record."""
        if self._log is not None:
            self._log.write(fields)

    def signed(self, ticket: Ticket, tenant: str, service: str = "") -> None:
        """A ticket was signed for a tenant and a class of service."""
        named = {"tenant_name": tenant, "class": service}
        self.record(permission(RecordKind.TICKET, ticket, **named))

    def changed(self, change: ChangeEntry) -> None:
        """Record a change if an operator made it, or if a source was barred."""
        if self._log is not None and change.loop in _KINDS:
            self._log.write(
                {
                    "kind": _KINDS[change.loop],
                    "operator": _operator.get(),
                    "action": change.action,
                    "what": change.what,
                    "old": change.old,
                    "new": change.new,
                    **change.numbers,
                }
            )

    def refused(self, request: web.Request, status: int, operator: str = "") -> None:
        """A request had no right, or an operator's change was refused.

        Args:
            request: Only its method, route and address are recorded.
            operator: Name of the operator's key; empty without a right.
        """
        if self._log is None:
            return
        resource = getattr(request.match_info.route, "resource", None)
        route = str(resource.canonical) if resource is not None else ""
        key = (request.method[:16], route, str(status), request.remote or "", operator)
        if self._refusals.take(key, time.monotonic_ns()):
            self._log.write(_refusal(key))
        elif self._counting is None:
            loop = asyncio.get_running_loop()
            self._counting = loop.call_later(WINDOW_NS / NS_PER_S, self._count)

    async def passed(
        self, request: web.Request, handler: Handler, operator: str
    ) -> web.StreamResponse:
        """Answer a request that has its right; changes are recorded before they are answered.

        Args:
            operator: Name of the operator's key; empty for clients.

        Raises:
            RequestError: It would change something, and nothing can be recorded.
        """
        if self._log is None or not operator or request.method in _READS:
            return await handler(request)
        if not self._log.accepts:
            self.refused(request, 503, operator)
            raise RequestError(
                'the audit log cannot be written, and audit.on_full is "closed": nothing is '
                "changed; make room on its disk",
                status=503,
            )
        token = _operator.set(operator)
        try:
            return await handler(request)
        except RequestError as error:
            self.refused(request, error.status, operator)
            raise
        finally:
            _operator.reset(token)
            await self._log.written()

    def close(self) -> None:
        """End the log. Blocks for as long as the disk takes."""
        if self._counting is not None:
            self._counting.cancel()
        if self._log is not None:
            self._count()
            self._log.close()

    def _count(self) -> None:
        self._counting = None
        for key, count in self._refusals.counted(time.monotonic_ns(), is_end=True):
            if self._log is not None:
                self._log.write(_refusal(key or ("", "", "0", "", ""), count=count))


def _refusal(key: tuple[str, ...], **fields: object) -> dict[str, object]:
    method, route, status, address, operator = key
    return {
        "kind": RecordKind.REFUSAL,
        "reason": _REASONS.get(status, "refused"),
        "method": method,
        "route": route,
        "status": int(status),
        "address": address,
        "operator": operator,
        **fields,
    }


_KINDS = {Loop.OPERATOR: RecordKind.OPERATOR, Loop.INTEGRITY: RecordKind.ALARM}
_REASONS = {
    "401": "unauthorized",
    "403": "forbidden",
    "429": "too_many_wrong_keys",
    "503": "not_audited",
}
