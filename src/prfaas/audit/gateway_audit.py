"""Records of a gateway: tickets that it signs, changes by operators, requests without a right."""

from __future__ import annotations

import asyncio
import time

from prfaas.audit.metrics import AuditMetrics
from prfaas.audit.settings import AuditSettings
from prfaas.audit.writer import AuditLog
from prfaas.core.audit.records import RecordKind, permission
from prfaas.core.audit.refusals import WINDOW_NS, RefusalCounts
from prfaas.core.control.changes import Loop
from prfaas.core.facts import FactStream
from prfaas.core.request.facts import ChangeAsked, RequestRefused, SettingChanged, TicketSigned
from prfaas.errors import RequestError
from prfaas.units import NS_PER_S


class GatewayAudit:
    """Writes the records of one gateway; ConfigError if the log cannot be written.

    Args:
        metrics: Show the state of the log.
    """

    def __init__(self, settings: AuditSettings, gateway: str, metrics: AuditMetrics) -> None:
        self.log = AuditLog(settings, gateway, metrics)
        self._refusals = RefusalCounts()
        self._counting: asyncio.TimerHandle | None = None

    def follow(self, facts: FactStream) -> None:
        """Record the facts of the gateway from now on, and refuse what cannot be recorded."""
        facts.guard(ChangeAsked, self._may_change)
        facts.subscribe(TicketSigned, self._signed)
        facts.subscribe(SettingChanged, self._changed)
        facts.subscribe(RequestRefused, self._refused)
        facts.keep(self.log.written)

    def _may_change(self, _: ChangeAsked) -> None:
        if not self.log.accepts:
            raise RequestError(
                'the audit log cannot be written, and audit.on_full is "closed": nothing is '
                "changed; make room on its disk",
                status=503,
            )

    def _signed(self, fact: TicketSigned) -> None:
        named = {"tenant_name": fact.tenant, "class": fact.service}
        self.log.write(permission(RecordKind.TICKET, fact.ticket, **named))

    def _changed(self, fact: SettingChanged) -> None:
        """Record a change if an operator made it, or if a source was barred."""
        change = fact.change
        if change.loop in _KINDS:
            self.log.write(
                {
                    "kind": _KINDS[change.loop],
                    "operator": fact.operator,
                    "action": change.action,
                    "what": change.what,
                    "old": change.old,
                    "new": change.new,
                    **change.numbers,
                }
            )

    def _refused(self, fact: RequestRefused) -> None:
        key = (fact.method, fact.route, str(fact.status), fact.address, fact.operator)
        if self._refusals.take(key, time.monotonic_ns()):
            self.log.write(_refusal(key))
        elif self._counting is None:
            loop = asyncio.get_running_loop()
            self._counting = loop.call_later(WINDOW_NS / NS_PER_S, self._count)

    def close(self) -> None:
        """End the log. Blocks for as long as the disk takes."""
        if self._counting is not None:
            self._counting.cancel()
        self._count()
        self.log.close()

    def _count(self) -> None:
        self._counting = None
        for key, count in self._refusals.counted(time.monotonic_ns(), is_end=True):
            self.log.write(_refusal(key or ("", "", "0", "", ""), count=count))


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
