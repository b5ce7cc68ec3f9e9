"""Reports of purges, as the API shows them."""

from __future__ import annotations

from typing import Any

from prfaas.errors import RequestError
from prfaas.purge.targets import Target
from prfaas.wire.messages.gateway import OrderDone

TAKEN_AGAIN = (
    "it accepted blocks of the source again before all engines were reset: it was restarted, or "
    "the reset took more than two minutes; run the purge again"
)


def report_of(
    target: Target,
    found: dict[str, OrderDone],
    forgot: dict[str, str],
    decision: dict[str, object] | None,
) -> dict[str, Any]:
    """Return the report of a purge, as the API shows it.

    Args:
        found: Result at each pool node.
        forgot: Why each engine did not forget; empty if it did.
        decision: The entry of the purge; None for a dry run.
    """
    problems = [told.problem for told in found.values()] + list(forgot.values())
    return {
        "source": target.source,
        "tenant": target.tenant,
        "request": target.request,
        "dry_run": decision is None,
        "is_complete": not any(problems),
        "pools": [_at_pool(name, told) for name, told in found.items()],
        "engines": [{"name": name, "problem": problem} for name, problem in forgot.items()],
        "decision": decision,
    }


def _at_pool(name: str, told: OrderDone) -> dict[str, Any]:
    fields = (
        "num_blocks",
        "host_bytes",
        "disk_bytes",
        "num_transfers",
        "problem",
        "shared_bytes",
    )
    return {"name": name} | {field: getattr(told, field) for field in fields}


def unknown(target: Target, known: list[str]) -> RequestError:
    """Return the refusal of a purge of a pool or tenant that nobody knows."""
    kind, name = ("pool", target.source) if target.tag is None else ("tenant", target.tenant)
    return RequestError(
        f"there is no {kind} {name[:80]!r}, and no block came from such a {kind}; known {kind}s: "
        f"{', '.join(known) or 'none'}",
        status=404,
    )
