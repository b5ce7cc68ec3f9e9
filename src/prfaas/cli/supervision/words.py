"""Changes of parts in words."""

from __future__ import annotations

from prfaas.cli.supervision.restarts import Phase
from prfaas.cli.supervision.supervisor import PartChange


def line_of(change: PartChange) -> str:
    """One line about a part in a new phase."""
    part = change.part
    who = f"{part.kind} {part.name}"
    match change.phase:
        case Phase.STARTING:
            return f"{who} is starting"
        case Phase.READY:
            return f"{who} is ready"
        case Phase.UNHEALTHY:
            return (
                f"{who} runs and does not answer at {part.health_url}; it is not restarted for "
                f"that: `prfaas ctl restart {part.name}` does so"
            )
        case Phase.ENDING:
            return f"{who} {change.reason or 'is asked to restart'}; stopping it"
        case Phase.WAITING:
            seconds = change.due_in_s or 0.0
            return f"{who} {change.reason}; restart in {seconds:.1f} s; see {part.log}"
        case Phase.FAILED:
            times = f" {change.failures} times in a row, the last time" * (change.failures > 1)
            return (
                f"{who} failed{times}: it {change.reason}; it is not restarted automatically: "
                f"`prfaas ctl restart {part.name}` does so; see {part.log}"
            )
