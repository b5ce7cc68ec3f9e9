"""`prfaas audit`: verification of audit logs, and queries."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from prfaas.audit.chain_file import instant
from prfaas.audit.reading import Filter, Sums, logs_of, num_bytes, record_of, records, verify, words
from prfaas.cli.common.options import PATH
from prfaas.cli.common.reading_progress import reading_bytes
from prfaas.core.audit.records import RecordKind
from prfaas.core.audit.verification import VerificationReport
from prfaas.errors import ConfigError

IN_FOLDER = click.argument("folder", type=PATH)
NAME = click.option("--name", help="One process; all whose logs are in FOLDER if absent.")
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def audit() -> None:
    """Verify and search the audit logs of gateways and pool nodes.

    \b
    Examples:
      prfaas audit verify /var/lib/prfaas/audit --name pd-pool --key pd-pool.pub
      prfaas audit query /var/lib/prfaas/audit --kind operator --since 2026-11-23
    """


@audit.command(name="verify")
@IN_FOLDER
@NAME
@click.option(
    "--key",
    help="Public key of the process that is kept elsewhere: a file such as NAME.pub, or its 64 hex "
    "digits. NAME.pub in FOLDER if absent.",
)
@click.option(
    "--expect-lines",
    type=click.IntRange(1),
    help="Lines that are signed at least: prfaas_pool_audit_last_line or "
    "prfaas_gateway_audit_last_line, as scraped before the last checkpoint.",
)
@click.option(
    "--head",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Copy of NAME.head that is kept elsewhere: its checkpoint has to be in the log.",
)
@AS_JSON
def verify_command(
    folder: Path,
    name: str | None,
    key: str | None,
    expect_lines: int | None,
    head: Path | None,
    *,
    as_json: bool,
) -> None:
    """Verify the logs in FOLDER: every line, the chain over all files, every signature.

    FOLDER is the `folder` of [audit], or a copy with the files NAME.*.jsonl, NAME.head and
    NAME.pub. Exit code 1 if a log is damaged.

    \b
    Examples:
      prfaas audit verify .state/audit
      prfaas audit verify .state/audit --name pd-pool --key pd-pool.pub --expect-lines 48211
    """
    logs = logs_of(folder, name)
    if (key or expect_lines or head) and len(logs) > 1:
        raise ConfigError(f"--key, --expect-lines and --head need --name, one of {', '.join(logs)}")
    public = _public_key(key) if key else None
    reports = {}
    for log, files in logs.items():
        with reading_bytes(folder, num_bytes(files)) as on_bytes:
            reports[log] = verify(
                folder,
                log,
                files,
                public_key=public,
                expected_lines=expect_lines or 0,
                known_head=head,
                on_bytes=on_bytes,
            )
    if as_json:
        found = {
            log: asdict(report) | {"is_intact": report.is_intact} for log, report in reports.items()
        }
        click.echo(json.dumps({"logs": found}, indent=2))
    else:
        for log, report in reports.items():
            _show(log, report, is_key_given=public is not None)
    if not all(report.is_intact for report in reports.values()):
        click.get_current_context().exit(1)


@audit.command(name="query")
@IN_FOLDER
@NAME
@click.option("--since", help="Earliest time, ISO 8601, UTC unless it has an offset.")
@click.option("--until", help="Time before which a record has to be.")
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice([kind.value for kind in RecordKind]),
    help="Kinds of records; all but the log's own book-keeping if absent.",
)
@click.option("--tenant", help="Tenant class, or its beginning; in logs of gateways also a name.")
@click.option("--outcome", help="Outcome of a movement, or reason of a refusal.")
@click.option("--source", help="Pool that sent the blocks, or that was purged.")
@click.option("--operator", help="Name of the operator's key.")
@click.option("--transfer", help="Id of a ticket and its transfer, or its beginning.")
@click.option("--sums", is_flag=True, help="Print the number of records, and sums of bytes.")
@AS_JSON
def query_command(
    folder: Path,
    name: str | None,
    since: str | None,
    until: str | None,
    kinds: tuple[str, ...],
    *,
    sums: bool,
    as_json: bool,
    **fields: str | None,
) -> None:
    """Print the records in FOLDER that meet all conditions, log by log, in the order of lines.

    The chain is not checked: run `prfaas audit verify` first.

    \b
    Examples:
      prfaas audit query .state/audit --kind movement --outcome link_lost
      prfaas audit query .state/audit --kind movement --sums
      prfaas audit query .state/audit --operator alice --json
    """
    from_, to = instant(since) if since else None, instant(until) if until else None
    wanted = Filter(from_, to, frozenset(kinds), **fields)
    logs, total = logs_of(folder, name), Sums()
    with reading_bytes(folder, sum(map(num_bytes, logs.values()))) as on_bytes:
        for log, files in logs.items():
            for line in records(files, on_bytes):
                if not wanted.takes(line):
                    continue
                if sums:
                    total.add(line)
                else:
                    record = record_of(log, line)
                    click.echo(json.dumps(record) if as_json else words(record))
    if sums:
        _show_sums(total, as_json=as_json)


def _show(log: str, report: VerificationReport, *, is_key_given: bool) -> None:
    state = "intact" if report.is_intact else "DAMAGED"
    click.echo(
        f"{log}: {state}; {report.num_lines} lines, {report.num_checkpoints} checkpoints, the last "
        f"one at line {report.signed_lines}, {report.signed_at or 'never'}"
    )
    for text in report.findings:
        click.echo(f"  DAMAGE  {text}")
    if report.num_findings > len(report.findings):
        click.echo(f"  DAMAGE  {report.num_findings - len(report.findings)} more")
    for text in report.notes:
        click.echo(f"  note    {text}")
    if report.unsigned_lines:
        click.echo(
            f"  note    not signed: lines after the last checkpoint ({report.unsigned_lines}); an "
            "edit there, or a cut, does not show without --expect-lines or --head"
        )
    if not is_key_given:
        click.echo(
            f"  note    the key is {log}.pub beside the log; whoever can replace both can sign "
            "anew: compare with a key kept elsewhere (--key)"
        )


def _show_sums(sums: Sums, *, as_json: bool) -> None:
    rows = sums.as_json()
    if as_json:
        click.echo(json.dumps({"sums": rows}, indent=2))
        return
    click.echo(f"{'records':>8} {'bytes':>16} {'link bytes':>16} {'wire bytes':>16}  what")
    for row in rows:
        names = [str(row[name]) for name in ("kind", "direction", "from", "to", "outcome")]
        counts = f"{row['records']:>8} {row['bytes']:>16,} {row['link_bytes']:>16,}"
        click.echo(f"{counts} {row['wire_bytes']:>16,}  {' '.join(filter(None, names))}")


def _public_key(text: str) -> str:
    path = Path(text)
    try:
        return path.read_text() if path.is_file() else text
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--key {text} cannot be read: {error}") from None
