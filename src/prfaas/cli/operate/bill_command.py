"""`prfaas bill`: usage and cost from audit logs."""

from __future__ import annotations

from pathlib import Path

import click

from prfaas.audit.chain_file import instant
from prfaas.audit.reading import num_bytes
from prfaas.billing.report import (
    DIMENSIONS,
    Period,
    as_csv,
    as_json,
    as_table,
    logs_in_folders,
    make_bill,
)
from prfaas.cli.common.options import PATH
from prfaas.cli.common.reading_progress import reading_bytes
from prfaas.config.load import load_deployment
from prfaas.errors import ConfigError

_ALL = ",".join(DIMENSIONS)


@click.command()
@click.argument("sources", nargs=-1, required=True, type=PATH)
@click.option("--from", "since", help="First instant, ISO 8601, UTC unless it has an offset.")
@click.option("--to", "until", help="Instant after the last one.")
@click.option("--by", default=_ALL, help="What rows have in common; the rest is summed.")
@click.option(
    "--format",
    "form",
    default="table",
    type=click.Choice(["table", "csv", "json"]),
    help="table for people; csv and json have all amounts.",
)
def bill(
    sources: tuple[Path, ...], since: str | None, until: str | None, by: str, form: str
) -> None:
    """Print usage and cost by tenant, phase, cluster and class of service.

    SOURCES are folders of audit logs, or deployment files whose [audit] names one. Give the logs of
    the gateways and of all pool nodes. The chain is not checked: run `prfaas audit verify` first.

    \b
    Examples:
      prfaas bill /var/lib/prfaas/audit --from 2026-11-01 --to 2026-12-01
      prfaas bill pd-logs prfaas-logs --by tenant,phase --format csv
    """
    period = Period(instant(since) if since else "", instant(until) if until else "")
    if period.since and period.until and period.since >= period.until:
        raise ConfigError(f"--from {since} is not before --to {until}")
    names = _dimensions(by)
    folders = [_folder(source) for source in sources]
    logs = logs_in_folders(folders)
    total = 2 * sum(num_bytes(dict(files)) for files in logs.values())
    with reading_bytes(folders[0], total) as on_bytes:
        found = make_bill(logs, period, on_bytes)
    if form == "json":
        text = as_json(found, names, period)
    else:
        text = as_csv(found, names) if form == "csv" else as_table(found, names)
    click.echo(text, nl=False)


def _dimensions(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in DIMENSIONS or names.count(name) > 1:
            raise ConfigError(f"--by {text[:80]}: give some of {_ALL}, each once")
    return names


def _folder(source: Path) -> Path:
    if source.suffix != ".toml":
        return source
    table = load_deployment(source).audit
    if table is None:
        raise ConfigError(f"{source} has no [audit], so that nothing is recorded")
    return table.folder
