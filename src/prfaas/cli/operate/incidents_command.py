"""`prfaas ctl incidents`: what has happened to a deployment, and whom it touched."""

from __future__ import annotations

import time
from typing import Any

import click

from prfaas.cli.common.options import ParsedType
from prfaas.cli.operate.control_client import PrintedGateway, talks
from prfaas.incidents.alarm_kinds import Kind
from prfaas.incidents.incident import moment, span
from prfaas.units import NS_PER_S, parse_duration

LIMIT_MAX = 1000


@click.command()
@click.argument("incident_id", metavar="[ID]", required=False)
@click.option(
    "--since",
    type=ParsedType("duration", parse_duration),
    default="24h",
    help="Those that lasted into this time before now, such as 30min or 168h; default 24h.",
)
@click.option("--open", "is_open", is_flag=True, help="Only those that have not ended.")
@click.option("--kind", type=click.Choice([each.value for each in Kind]), help="Only this kind.")
@click.option("--limit", type=click.IntRange(1, LIMIT_MAX), default=50, help="So many.")
@talks
def incidents(
    gateway: PrintedGateway,
    incident_id: str | None,
    since: int,
    is_open: bool,
    kind: str | None,
    limit: int,
) -> None:
    """List incidents, the newest last, or show the one with ID.

    An incident has a begin, an end, a cause, the requests and tenants that it touched, and what the
    system did. The gateway keeps them for 30 days, and over restarts.

    \b
    Examples:
      prfaas ctl incidents
      prfaas ctl incidents --since 2h --open
      prfaas ctl incidents 4f1c0a9b
    """
    if incident_id is not None:
        gateway.show(gateway.client.get("incidents", incident_id), lambda found: [found["text"]])
        return
    asked = {"since": max(0, int(time.time() - since / NS_PER_S)), "limit": limit}
    query: dict[str, Any] = asked | {"open": int(is_open)} | ({"kind": kind} if kind else {})
    gateway.show(gateway.client.get("incidents", **query), _lines)


def _lines(found: dict[str, Any]) -> list[str]:
    lines = [_line(each) for each in reversed(found["incidents"])] or ["no incidents"]
    why = found["why_unwritten"]
    return lines + ([f"THE LOG CANNOT BE WRITTEN: {why}"] if why else [])


def _line(found: dict[str, Any]) -> str:
    began, ended = found["began_at"], found["ended_at"]
    lasted = "OPEN" if ended is None else span(ended - began)
    touched = f"{found['num_requests']:,} requests" if found["num_requests"] else ""
    return (
        f"{moment(began)}  {lasted:>12}  {found['id']}  {found['severity']:<8}  "
        f"{found['title']:<32}  {touched}"
    ).rstrip()
