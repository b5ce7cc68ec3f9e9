"""`prfaas ctl prefix`: orders on the blocks of one prompt."""

from __future__ import annotations

import sys
from typing import Any

import click

from prfaas.cli.common.options import DURATION
from prfaas.cli.operate.control_client import PURGE_S, PrintedGateway, talks
from prfaas.units import NS_PER_S, format_seconds, format_size, ns

PIN_DEFAULT = "1h"


@click.group()
def prefix() -> None:
    """Steer the blocks of one prompt: keep them in memory, copy them to a pool, drop them.

    REQUEST is the X-Request-Id of an answer of this gateway, or eight or more of its first
    characters. Other prompts that begin alike share blocks with it. The cost is printed first; with
    --dry-run nothing else is done.

    \b
    Examples:
      prfaas ctl prefix pin 4f1c0a9be2d54b6b8f2f3c1f6c1f8f7e --for 8h
      prfaas ctl prefix copy 4f1c0a9be2d54b6b8f2f3c1f6c1f8f7e --to pd-pool --dry-run
      prfaas ctl prefix forget 4f1c0a9be2d54b6b8f2f3c1f6c1f8f7e
    """


@prefix.command()
@click.argument("request")
@click.option("--pool", default="", show_default=False, help="Only in this pool; without, in all.")
@click.option(
    "--for", "for_ns", type=DURATION, default=PIN_DEFAULT, help="How long; 30 days at most."
)
@click.option("--dry-run", is_flag=True, help="Only count the blocks.")
@talks
def pin(gateway: PrintedGateway, request: str, pool: str, for_ns: int, dry_run: bool) -> None:
    """Keep the blocks of a prompt in the memory of pool nodes for a time.

    Pinned blocks are evicted after all others. Blocks on disk are read into memory, and blocks that
    come later are pinned within half a minute. All pins hold a quarter of a pool's memory at most.
    A pin ends with its gateway, and not with a restart of a pool node.

    \b
    Examples:
      prfaas ctl prefix pin 4f1c0a9be2d54b6b8f2f3c1f6c1f8f7e --for 8h
      prfaas ctl prefix pin 4f1c0a9b --pool pd-pool --dry-run
    """
    body = {"request": request, "pool": pool, "for_s": for_ns / NS_PER_S}
    if not for_ns:
        raise click.UsageError("--for has to be above 0; `unpin` ends a pin")
    if not dry_run:
        found = gateway.client.post("prefixes", body={**body, "dry_run": True}, limit_s=PURGE_S)
        click.echo("\n".join(_pin_lines(found)), err=True)
    _order(gateway, {**body, "dry_run": dry_run})


@prefix.command()
@click.argument("request")
@talks
def unpin(gateway: PrintedGateway, request: str) -> None:
    """End the pin of a prompt.

    \b
    Examples:
      prfaas ctl prefix unpin 4f1c0a9be2d54b6b8f2f3c1f6c1f8f7e
    """
    _order(gateway, {"request": request, "for_s": 0})


@prefix.command()
@click.argument("request")
@click.option("--to", "pool", required=True, help="The pool that gets the blocks.")
@click.option(
    "--from",
    "source",
    default="",
    show_default=False,
    help="A pool; without, the one with the most.",
)
@click.option("--dry-run", is_flag=True, help="Only show the cost.")
@talks
def copy(gateway: PrintedGateway, request: str, pool: str, source: str, dry_run: bool) -> None:
    """Copy the blocks of a prompt to a pool, over a link that is up.

    Links go from the pools of PrfaaS clusters to those of PD clusters, and between the hosts of a
    cluster. Tickets, regions and budgets apply as to every transfer.

    \b
    Examples:
      prfaas ctl prefix copy 4f1c0a9be2d54b6b8f2f3c1f6c1f8f7e --to pd-pool --dry-run
      prfaas ctl prefix copy 4f1c0a9b --to pd-pool --from prfaas-pool
    """
    body = {"request": request, "pool": pool, "source": source}
    if not dry_run:
        found = gateway.client.post("prefixes", body={**body, "dry_run": True})
        click.echo("\n".join(_copy_lines(found)), err=True)
    found = gateway.client.post("prefixes", body={**body, "dry_run": dry_run}, limit_s=PURGE_S)
    gateway.show(found, _copy_lines)
    if found["problem"]:
        sys.exit(1)


@prefix.command()
@click.argument("request")
@click.option("--dry-run", is_flag=True, help="Only count the blocks.")
@talks
def forget(gateway: PrintedGateway, request: str, dry_run: bool) -> None:
    """Drop the blocks of a prompt everywhere, as `prfaas ctl purge --prefix-of` does.

    \b
    Examples:
      prfaas ctl prefix forget 4f1c0a9be2d54b6b8f2f3c1f6c1f8f7e --dry-run
    """
    gateway.purge({"prefix_of": request}, is_dry=dry_run, counts_first=True)


def _order(gateway: PrintedGateway, body: dict[str, object]) -> None:
    found = gateway.client.post("prefixes", body=body, limit_s=PURGE_S)
    gateway.show(found, _pin_lines)
    if any(pool["problem"] for pool in found["pools"]):
        sys.exit(1)


def _pin_lines(found: dict[str, Any]) -> list[str]:
    return [f"pool       {pool['name']}  {_pinned(pool, found)}" for pool in found["pools"]]


def _pinned(pool: dict[str, Any], found: dict[str, Any]) -> str:
    if pool["problem"]:
        return f"NOT DONE: {pool['problem']}"
    if not found["for_s"]:
        return "not pinned any more"
    amount = f"{pool['num_blocks']:,} blocks, {format_size(pool['num_bytes'])}"
    if found["dry_run"]:
        return f"has {amount} of the prompt of {found['request']}"
    left = pool["num_left_out"]
    rest = f"; {left:,} left out: pins hold a quarter of its memory at most" if left else ""
    return f"pinned {amount} for {format_seconds(ns(found['for_s']))}{rest}"


def _copy_lines(found: dict[str, Any]) -> list[str]:
    seconds, price = found["seconds"], found["price"]
    taking = "an unknown time" if seconds is None else format_seconds(ns(seconds))
    costing = "" if price is None else f", price {price:.6g}"
    tokens = found["tokens"] - found["have_tokens"]
    amount = f"{tokens:,} tokens, {format_size(found['num_bytes'])}"
    path = f"{found['source']} to {found['destination']}"
    if found["problem"]:
        return [f"copy       {path}  NOT DONE: {found['problem']}"]
    if found["dry_run"]:
        return [f"copy       {path}  {amount}, {taking} on the link{costing}"]
    return [f"copy       {path}  done: {amount}"]
