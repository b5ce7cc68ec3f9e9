"""Display of a gateway's state by `prfaas top`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from prfaas.units import NS_PER_MS, format_rate, format_seconds, format_size

State = dict[str, Any]
_ID_CHARS = 8  # enough for `prfaas ctl explain`
_PATHS = {"remote": "cyan", "local": "yellow"}


def screen(state: State) -> RenderableType:
    """The whole screen."""
    tables = _engines(state), _pools(state), _links(state), _costs(state), _requests(state)
    return Group(_head(state), *_alarms(state), *tables)


def _head(state: State) -> Text:
    recent, sample = state["recent"], state["sample"]
    paths = recent["paths"]
    finished = sum(path["num_requests"] for path in paths.values())
    share = f"{paths['remote']['num_requests'] / finished:.0%}" if finished else "-"
    return Text(
        f"{state['model']}  policy {state['policy']}  in flight {sample['num_in_flight']}  "
        f"{recent['num_requests']} requests in {recent['window_s']:.0f} s, {share} offloaded  "
        f"TTFT median {_ms(paths['local']['ttft_p50_ms'])} local, "
        f"{_ms(paths['remote']['ttft_p50_ms'])} offloaded  "
        f"KV moved {format_size(sample['kv_bytes'])}"
    )


def _alarms(state: State) -> Iterator[Text]:
    for alarm in state["alarms"]:
        style = "bold red" if alarm["severity"] in ("critical", "page") else "yellow"
        yield Text(f"! {alarm['text']}", style=style)


def _engines(state: State) -> Table:
    table = _table("cluster", "engine", "state", "running", "waiting", "KV use")
    for cluster in state["clusters"]:
        name = cluster["name"] + ("" if cluster["is_on"] else " (off)")
        for engine in cluster["engines"]:
            trouble = _trouble(engine)
            shown = Text(trouble or "ready", style="red" if trouble else "green")
            figures = [_count(engine[key]) for key in ("num_running", "num_waiting")]
            use = "-" if engine["kv_use"] is None else f"{engine['kv_use']:.0%}"
            table.add_row(name, engine["name"], shown, *figures, use)
            name = ""
    return table


def _pools(state: State) -> Table:
    table = _table("pool", "state", "memory", "disk", "blocks", "leased")
    for pool in (pool for cluster in state["clusters"] for pool in cluster["pools"]):
        heard = pool["index_state"] if pool["is_live"] else "not heard"
        tiers = {tier["name"]: tier for tier in pool["tiers"]}
        table.add_row(
            pool["name"],
            Text(heard, style="green" if heard == "exact" else "red"),
            *(_use(tiers.get(name)) for name in ("host", "disk")),
            f"{pool['num_blocks']:,}",
            f"{pool['num_leased']:,}",
        )
    return table


def _use(tier: State | None) -> str:
    if tier is None:
        return "-"
    return f"{format_size(tier['used_bytes'])} of {format_size(tier['capacity_bytes'])}"


def _trouble(engine: State) -> str:
    if not engine["is_ready"]:
        return "down"
    if engine["is_drained"]:
        return "drained"
    return "" if engine["breaker"] == "closed" else "spared"


def _links(state: State) -> Table:
    table = _table("link", "state", "goodput", "round trip", "waiting", "threshold")
    for name, link in state["sample"]["links"].items():
        carried = link["carried_bits_per_s"]
        busy = carried > 0 or link["queued_bytes"] + link["in_flight_bytes"] > 0
        shown = ("busy" if busy else "idle") if link["up"] else "down"
        table.add_row(
            name,
            Text(shown, style="green" if link["up"] else "red"),
            format_rate(carried) if busy else "-",
            _ms(link["rtt_ms"] or None),
            format_size(link["queued_bytes"]),
            "-" if (tokens := link["offload_threshold"]) is None else f"{tokens:,} tokens",
        )
    return table


def _costs(state: State) -> Table:
    """Traffic of links, in a separate table to fit names in 80 columns."""
    table = _table("link", "KV moved", "cost so far")
    for name, link in state["sample"]["links"].items():
        cost = "no price set" if link["cost"] is None else f"{link['cost']:,.4g}"
        table.add_row(name, format_size(link["kv_bytes"]), cost)
    return table


def _requests(state: State) -> Table:
    table = _table("time", "request", "path", "why", "prompt", "cached", "TTFT", "outcome")
    for request in state["requests"]:
        fallback = ", fell back" if request["fallback"] else ""
        table.add_row(
            datetime.fromtimestamp(request["started_at"]).strftime("%H:%M:%S"),
            request["request_id"][:_ID_CHARS],
            Text(request["path"], style=_PATHS.get(request["path"], "")),
            request["refusal"] or request["reason"] or "-",
            f"{request['num_prompt_tokens']:,}",
            _count(request["cached_tokens"]),
            _ms(request["ttft_ms"]),
            request["outcome"] + fallback,
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    numbers = {
        "running",
        "KV use",
        "blocks",
        "memory",
        "disk",
        "leased",
        "goodput",
        "waiting",
        "KV moved",
        "cost so far",
        "threshold",
        "prompt",
        "cached",
        "TTFT",
    }
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=True)
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else format_seconds(round(value * NS_PER_MS))


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
