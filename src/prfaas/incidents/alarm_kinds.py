"""The form of an entry in the list of alarms."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """Severity of an alarm or an incident."""

    PAGE = "page"
    """Requests fail, or data is not what it should be: wake somebody."""
    CRITICAL = "critical"
    """A part is missing; requests go elsewhere."""
    WARNING = "warning"
    """It works, and not as well as it could."""
    NOTE = "note"
    """Somebody or something changed a setting; no alarm."""


class Kind(StrEnum):
    """Part of the deployment that an alarm or an incident is about."""

    ENGINE = "engine"
    POOL = "pool"
    LINK = "link"
    BREAKER = "breaker"
    MEMBER = "member"
    THRESHOLD = "threshold"
    ADMISSION = "admission"
    OPERATOR = "operator"
    CERTIFICATE = "certificate"
    REQUESTS = "requests"
    PLAN = "plan"
    GATEWAY = "gateway"


@dataclass(frozen=True, slots=True)
class AlertRule:
    """A rule of Prometheus."""

    expr: str
    """PromQL."""
    after: str
    """Time for which it has to hold, as Prometheus writes it."""
    summary: str
    """One line, with labels in braces."""
    means: str = ""
    """Known part of the cause; before what to do."""
    note: str = ""
    """A comment on the expression."""


@dataclass(frozen=True, slots=True)
class AlarmKind:
    """One alarm of the list."""

    name: str
    """Words joined by underscores; the alert and the runbook are named after it."""
    kind: Kind
    severity: Severity
    condition: str
    """Condition under which the console shows it; empty if a gateway cannot see it."""
    does: str
    """Reaction of the system, one sentence."""
    todo: str
    """Task of the operator."""
    rule: AlertRule | None = None
    """None if Prometheus cannot see it."""

    @property
    def title(self) -> str:
        """The name for people: "Engine down"."""
        return self.name.replace("_", " ").capitalize()

    @property
    def alert(self) -> str:
        """Name of the rule of Prometheus."""
        return "Prfaas" + "".join(word.capitalize() for word in self.name.split("_"))

    @property
    def runbook(self) -> str:
        """Page of the documentation with the steps."""
        return f"docs/runbooks/{self.name.replace('_', '-')}.md"
