"""`prfaas ctl`: watch and steer a running gateway."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import click

from prfaas.cli.common.options import ParsedType
from prfaas.cli.operate.control_client import PrintedGateway, talks
from prfaas.cli.operate.ctl_views import decision_line, explain_lines, status_lines, story_lines
from prfaas.cli.operate.incidents_command import incidents
from prfaas.cli.operate.prefix_command import prefix
from prfaas.cli.supervision.commands import parts, restart
from prfaas.errors import ConfigError

FOLLOW_S = 1.0
LIMIT_MAX = 1000


def _link(text: str) -> tuple[str, str]:
    source, _, destination = text.partition(":")
    if not source or not destination:
        raise ConfigError(f"{text!r} is not SOURCE:DESTINATION, two names of pools")
    return source, destination


@click.group()
def ctl() -> None:
    """Inspect and control a running gateway: loops, threshold, engines and clusters.

    Changes last until the gateway restarts; they are not stored. Every change is an entry in
    `decisions`.

    \b
    Examples:
      prfaas ctl status
      prfaas ctl parts
      prfaas ctl restart pd-engine
      prfaas ctl explain 4f1c0a9be2d54b6b8f2f3c1f6c1f8f7e
      prfaas ctl threshold set 8000 --link prfaas-pool:pd-pool
      prfaas ctl prefix pin 4f1c0a9be2d54b6b8f2f3c1f6c1f8f7e --for 8h
      prfaas ctl drain pd-engine-2 --url http://gateway.example.net:8000
      prfaas ctl decisions --follow
      prfaas ctl incidents --since 2h
    """


ctl.add_command(parts)
ctl.add_command(restart)
ctl.add_command(prefix)
ctl.add_command(incidents)


@ctl.command()
@talks
def status(gateway: PrintedGateway) -> None:
    """Show loops, thresholds, links, clusters, engines and pools.

    \b
    Examples:
      prfaas ctl status
      prfaas ctl status --json
    """
    gateway.show(gateway.client.get("status"), status_lines)


@ctl.command()
@talks
def freeze(gateway: PrintedGateway) -> None:
    """Stop all loops: thresholds, roles and copies no longer change.

    \b
    Examples:
      prfaas ctl freeze
    """
    gateway.change("loops", frozen=True)


@ctl.command()
@talks
def unfreeze(gateway: PrintedGateway) -> None:
    """Resume the loops from the current state.

    \b
    Examples:
      prfaas ctl unfreeze
    """
    gateway.change("loops", frozen=False)


@ctl.group()
def threshold() -> None:
    """The offload threshold.

    \b
    Examples:
      prfaas ctl threshold set 8000
      prfaas ctl threshold unset
    """


_LINK = click.option(
    "--link", type=ParsedType("link", _link), help="Only for this link, as in prfaas-pool:pd-pool."
)


@threshold.command("set")
@click.argument("tokens", type=click.IntRange(1))
@_LINK
@talks
def set_threshold(gateway: PrintedGateway, tokens: int, link: tuple[str, str] | None) -> None:
    """Offload prompts with more than TOKENS new tokens from now on.

    It stays until `prfaas ctl threshold unset` or a restart; no loop moves it.

    \b
    Examples:
      prfaas ctl threshold set 8000
      prfaas ctl threshold set 8000 --link prfaas-pool:pd-pool
    """
    gateway.change("threshold", tokens=tokens, **_ends(link))


@threshold.command("unset")
@_LINK
@talks
def unset_threshold(gateway: PrintedGateway, link: tuple[str, str] | None) -> None:
    """Give the threshold back to the deployment file, the plan and the loops.

    \b
    Examples:
      prfaas ctl threshold unset
      prfaas ctl threshold unset --link prfaas-pool:pd-pool
    """
    gateway.change("threshold", tokens=None, **_ends(link))


def _ends(link: tuple[str, str] | None) -> dict[str, str]:
    return dict(zip(("source", "destination"), link, strict=True)) if link else {}


@ctl.command()
@click.argument("engine")
@talks
def drain(gateway: PrintedGateway, engine: str) -> None:
    """Send ENGINE no new requests; it completes the running ones. `status` shows when it is idle.

    \b
    Examples:
      prfaas ctl drain pd-engine-2
    """
    gateway.change("engines", engine, drained=True)


@ctl.command()
@click.argument("engine")
@talks
def resume(gateway: PrintedGateway, engine: str) -> None:
    """Let ENGINE take requests again.

    \b
    Examples:
      prfaas ctl resume pd-engine-2
    """
    gateway.change("engines", engine, drained=False)


@ctl.command()
@click.argument("cluster")
@talks
def off(gateway: PrintedGateway, cluster: str) -> None:
    """Send no engine of CLUSTER new requests.

    \b
    Examples:
      prfaas ctl off prfaas
    """
    gateway.change("clusters", cluster, on=False)


@ctl.command()
@click.argument("cluster")
@talks
def on(gateway: PrintedGateway, cluster: str) -> None:
    """Let CLUSTER take requests again.

    \b
    Examples:
      prfaas ctl on prfaas
    """
    gateway.change("clusters", cluster, on=True)


@ctl.command()
@click.argument("cluster")
@click.option("--gpu-hour", type=click.FloatRange(0, 1e9), help="Price of one GPU for one hour.")
@click.option("--per-tb", type=click.FloatRange(0, 1e9), help="Price of 10**12 bytes on its link.")
@click.option(
    "--leaves-in", type=click.FloatRange(0, 1e9), metavar="SECONDS", help="Its capacity is revoked."
)
@click.option("--stays", is_flag=True, help="Its capacity stays, or is back.")
@talks
def price(
    gateway: PrintedGateway,
    cluster: str,
    gpu_hour: float | None,
    per_tb: float | None,
    leaves_in: float | None,
    stays: bool,
) -> None:
    """Set prices of CLUSTER, or announce that its capacity is revoked.

    A CLUSTER that leaves gets only requests that are predicted to have left it by then. A change of
    the price file replaces these settings.

    \b
    Examples:
      prfaas ctl price far --gpu-hour 1.2
      prfaas ctl price far --leaves-in 30
      prfaas ctl price far --stays
    """
    if gpu_hour is None and per_tb is None and leaves_in is None and not stays:
        raise click.UsageError("give one of --gpu-hour, --per-tb, --leaves-in and --stays")
    given = {"gpu_hour": gpu_hour, "per_tb": per_tb, "leaves_in_s": leaves_in, "stays": stays}
    gateway.change("prices", cluster, **given)


@ctl.command()
@click.argument("request_id")
@talks
def explain(gateway: PrintedGateway, request_id: str) -> None:
    """Show the decision on a recent request, its reason and its course.

    REQUEST_ID is the X-Request-Id header of its answer; eight or more of its first characters are
    enough.

    \b
    Examples:
      prfaas ctl explain 4f1c0a9be2d54b6b8f2f3c1f6c1f8f7e
    """
    gateway.show(gateway.client.get("requests", request_id, "explanation"), explain_lines)


@ctl.command()
@click.argument("request_id")
@talks
def story(gateway: PrintedGateway, request_id: str) -> None:
    """Show the last 64 steps of a recent request: event, stage and actions of each.

    REQUEST_ID is the X-Request-Id header of its answer; eight or more of its first characters are
    enough.

    \b
    Examples:
      prfaas ctl story 4f1c0a9be2d54b6b8f2f3c1f6c1f8f7e
    """
    gateway.show(gateway.client.get("requests", request_id, "story"), story_lines)


@ctl.command()
@click.argument("tenant", required=False)
@click.option("--source", help="The pool whose blocks are not trusted.")
@click.option("--prefix-of", help="A recent request, the blocks of whose prompt are dropped.")
@click.option("--dry-run", is_flag=True, help="Only count them.")
@talks
def purge(
    gateway: PrintedGateway,
    tenant: str | None,
    source: str | None,
    prefix_of: str | None,
    dry_run: bool,
) -> None:
    """Drop all blocks of TENANT, all of a pool or computed from such blocks, or those of a prompt.

    Every pool node drops them from memory, disk and the tier of its site, and every engine resets
    its cache. The keys of TENANT are destroyed. Exits with 1 if a part was not reachable; the
    gateway then repeats the purge until it is complete.

    --prefix-of takes the X-Request-Id of an answer of this gateway, or eight or more of its first
    characters. Other prompts of the tenant that begin alike share blocks with it: they lose them,
    such as those of a system prompt. The number of blocks is printed first. Blocks of the answer
    stay.

    \b
    Examples:
      prfaas ctl purge search
      prfaas ctl purge --prefix-of 4f1c0a9be2d54b6b8f2f3c1f6c1f8f7e --dry-run
      prfaas ctl purge --source prfaas-pool --dry-run
      prfaas ctl purge --source prfaas-pool
    """
    given = {"tenant": tenant, "source": source, "prefix_of": prefix_of}
    target = {name: value for name, value in given.items() if value is not None}
    if len(target) != 1:
        raise click.UsageError("Give one of TENANT, --source POOL and --prefix-of REQUEST.")
    gateway.purge(target, is_dry=dry_run, counts_first=prefix_of is not None)


@ctl.command()
@click.option("--limit", type=click.IntRange(1, LIMIT_MAX), default=20, help="So many.")
@click.option("--follow", "-f", is_flag=True, help="Print new ones as they come, until Ctrl-C.")
@talks
def decisions(gateway: PrintedGateway, limit: int, follow: bool) -> None:
    """Show changes by loops and operators with their reasons, the newest last.

    \b
    Examples:
      prfaas ctl decisions --limit 5
      prfaas ctl decisions --follow
    """
    after = _print_entries(gateway, gateway.client.get("decisions", limit=limit), 0)
    with contextlib.suppress(KeyboardInterrupt):
        while follow:
            time.sleep(FOLLOW_S)
            newer = gateway.client.get("decisions", limit=LIMIT_MAX, after=after)
            after = _print_entries(gateway, newer, after)


def _print_entries(gateway: PrintedGateway, found: dict[str, Any], after: int) -> int:
    """Print entries, a line each; the number of the newest."""
    entries = found["decisions"][::-1]
    for entry in entries:
        click.echo(json.dumps(entry) if gateway.as_json else decision_line(entry))
    return int(entries[-1]["number"]) if entries else after
