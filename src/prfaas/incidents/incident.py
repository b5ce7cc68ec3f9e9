"""One incident: what has happened, from when to when, whom it touched, and what the system did."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec

from prfaas.incidents.alarm_kinds import Kind, Severity
from prfaas.incidents.alarm_list import BY_NAME

REQUESTS_MAX = 50
"""Ids that are kept of the requests that it touched; all are counted."""
TENANTS_MAX = 20
STEPS_MAX = 40
WORDS_MAX = 300
COUNTED_MAX = 4096
"""Ids that are remembered while it is open, to count each request once."""
_EFFECTS = {
    "prefill": "{} prefilled elsewhere",
    "transfer": "{} computed what did not arrive",
    "pull": "{} computed a prefix that was not fetched",
    "decode": "{} continued by another engine",
    "refused": "{} refused",
    "failed": "{} failed",
}


class IncidentStep(msgspec.Struct):
    """Something that happened within an incident."""

    at: float
    text: str


class Incident(msgspec.Struct):
    """An incident. Times are Unix seconds."""

    id: str
    """Eight hexadecimal digits."""
    name: str
    """An alarm of the list, or what was changed."""
    kind: Kind
    subject: str
    """Name of the part; empty for the deployment."""
    severity: Severity
    began_at: float
    cause: str
    """First words about it."""
    ended_at: float | None = None
    """None while it is open."""
    how_ended: str = ""
    """Empty if the part is simply well again."""
    num_times: int = 1
    """Times that it began; a part that flaps has one incident."""
    num_requests: int = 0
    """Requests that it touched."""
    requests: list[str] = []
    """Ids of the first of them."""
    tenants: dict[str, int] = {}
    """Number of these requests by tenant, of up to `TENANTS_MAX` tenants."""
    num_tenants: int = 0
    effects: dict[str, int] = {}
    """Number of events by what became of the requests: stages, "refused", "failed"."""
    steps: list[IncidentStep] = []
    num_steps: int = 0
    """Steps, those that are not kept included."""

    @property
    def key(self) -> tuple[str, str]:
        """Name and subject; no two open incidents have the same."""
        return self.name, self.subject

    @property
    def title(self) -> str:
        """A few words."""
        return f"{self.name.replace('_', ' ').capitalize()} {self.subject}".rstrip()

    def step(self, at: float, text: str) -> None:
        """Add to its time line; the first and the newest steps are kept."""
        self.num_steps += 1
        if len(self.steps) >= STEPS_MAX:
            del self.steps[STEPS_MAX // 2]
        self.steps.append(IncidentStep(at, text[:WORDS_MAX]))

    def touch(
        self, at: float, request: str, tenant: str, what: str, reason: str, new: bool
    ) -> None:
        """A request met it.

        Args:
            new: False if the request is counted already.
        """
        if what not in self.effects:
            self.step(at, f"request {request}: {_EFFECTS[what].format('').strip()} ({reason})")
        self.effects[what] = self.effects.get(what, 0) + 1
        if not new:
            return
        self.num_requests += 1
        if len(self.requests) < REQUESTS_MAX:
            self.requests.append(request)
        if tenant in self.tenants or len(self.tenants) < TENANTS_MAX:
            self.num_tenants += tenant not in self.tenants
            self.tenants[tenant] = self.tenants.get(tenant, 0) + 1

    # The four sentences

    @property
    def what(self) -> str:
        """Sentence for the event itself."""
        again = f" It happened {self.num_times} times." if self.num_times > 1 else ""
        return f"{self.cause[:1].upper()}{self.cause[1:]}.{again}"

    @property
    def when(self) -> str:
        """From when to when."""
        if self.ended_at is None:
            return f"Since {moment(self.began_at)}; it has not ended."
        if self.ended_at == self.began_at:
            return f"At {moment(self.began_at)}."
        seconds = self.ended_at - self.began_at
        how = f"; {self.how_ended}" if self.how_ended else ""
        return f"From {moment(self.began_at)} to {moment(self.ended_at)}, {span(seconds)}{how}."

    @property
    def whom(self) -> str:
        """Requests and tenants."""
        if not self.num_requests:
            return "It touched no request."
        more = "more than " if self.num_tenants >= TENANTS_MAX else ""
        names = ", ".join(f"{name} ({count})" for name, count in self.tenants.items())
        return (
            f"It touched {_number(self.num_requests, 'request')} of {more}"
            f"{_number(self.num_tenants, 'tenant')}: {names}."
        )

    @property
    def did(self) -> str:
        """Sentence for the actions of the system."""
        kind = BY_NAME.get(self.name)
        does = kind.does if kind is not None else ""
        done = [
            words.format(self.effects[what])
            for what, words in _EFFECTS.items()
            if what in self.effects
        ]
        if done:
            does += f" Of the requests: {', '.join(done)}."
            if not self.effects.keys() & {"refused", "failed"}:
                does += " None failed."
        return does.strip() or "Nothing: it is a change that was asked for."

    def brief(self) -> dict[str, object]:
        """The incident in a list."""
        kind = BY_NAME.get(self.name)
        names = ("id", "name", "title", "kind", "subject", "severity", "began_at", "ended_at")
        figures = ("num_requests", "num_tenants", "num_times", "cause")
        return {name: getattr(self, name) for name in (*names, *figures)} | {
            "todo": kind.todo if kind is not None else "",
            "runbook": kind.runbook if kind is not None else "",
        }

    def full(self) -> dict[str, object]:
        """All of it, in the four sentences as well."""
        told = {name: getattr(self, name) for name in ("what", "when", "whom", "did")}
        return (
            self.brief()
            | told
            | {
                "how_ended": self.how_ended,
                "requests": self.requests,
                "tenants": self.tenants,
                "effects": self.effects,
                "steps": [{"at": step.at, "text": step.text} for step in self.steps],
                "num_steps": self.num_steps,
                "text": "\n".join(self.lines()),
            }
        )

    def lines(self) -> Iterator[str]:
        """Everything as text, to be copied."""
        yield f"{self.title} [{self.severity}, incident {self.id}]"
        yield f"What    {self.what}"
        yield f"When    {self.when}"
        yield f"Whom    {self.whom}"
        yield f"System  {self.did}"
        if (kind := BY_NAME.get(self.name)) is not None:
            yield f"To do   {kind.todo} ({kind.runbook})"
        if self.requests:
            yield f"Requests  {' '.join(self.requests)}" + (
                f" and {more} more" if (more := self.num_requests - len(self.requests)) else ""
            )
        for step in self.steps:
            yield f"  {moment(step.at)}  {step.text}"


def moment(unix_s: float) -> str:
    """A time as text, in UTC."""
    at = datetime.fromtimestamp(unix_s, UTC)
    return f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 100_000} UTC"


def span(seconds: float) -> str:
    """A time from begin to end as text."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
