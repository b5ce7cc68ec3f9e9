"""Metrics of `/metrics`: as documented, and as dashboards and alerts query them."""

from __future__ import annotations

import asyncio
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from prfaas.cli.metrics_reference import Described, gateway_metrics, pool_metrics, reference
from prfaas.core.control.role_loop import Role
from prfaas.wire.messages.gateway import LinkTelemetry
from tests.gateway.alert_rules import DASHBOARD, ROOT, RULES, expressions
from tests.gateway.conftest import World, running, until
from tests.gateway.prompts import LONG, SHORT
from tests.plans import plan_file
from tests.pool.conftest import World as Pools
from tests.pool.conftest import world as pools_world

KNOWN = {
    sample: {*metric.labels, *(("le",) if sample.endswith("_bucket") else ())}
    for metric in [*gateway_metrics(), *pool_metrics()]
    for sample in metric.samples
}
"""Labels by sample."""
SCRAPED = {"job", "instance"}
"""Labels that Prometheus adds."""
pools = pools_world


def shown(text: str) -> dict[str, str]:
    """Types of the metrics in an answer of `/metrics`; when a counter began is none of them."""
    families = text_string_to_metric_families(text)
    return {f.name: f.type for f in families if not f.name.endswith("_created")}


def documented(metrics: list[Described]) -> dict[str, str]:
    return {metric.name: metric.kind for metric in metrics}


def test_the_page_is_written_from_the_code() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert page == reference(), "run: python -m prfaas.cli.metrics_reference > docs/metrics.md"


def test_names_follow_the_conventions() -> None:
    """https://prometheus.io/docs/practices/naming: a prefix, base units, no unit in a label."""
    wrong = re.compile(r"_(ns|ms|bits|milliseconds|kilobytes|percent)(_|$)|_total$")
    for metric in [*gateway_metrics(), *pool_metrics()]:
        assert metric.name.startswith("prfaas_"), metric.name
        assert not wrong.search(metric.name), metric.name
        assert metric.what, metric.name


def test_no_name_is_used_by_both_kinds_of_process() -> None:
    both = {metric.name for metric in gateway_metrics()} & {m.name for m in pool_metrics()}
    assert not both


async def test_a_gateway_shows_what_is_documented(world: World) -> None:
    for prompt in (SHORT, LONG):
        await world.post({"prompt": prompt, "max_tokens": 2})
    async with world.http.get(f"{world.url}/metrics") as response:
        assert shown(await response.text()) == documented(gateway_metrics())


async def test_a_pool_node_shows_what_is_documented(pools: Pools) -> None:
    prfaas, *_ = await pools.two_sites()
    text = generate_latest(prfaas.node.metrics.registry).decode()
    assert shown(text) == documented(pool_metrics())


async def test_the_backlog_is_the_prefill_work_that_a_cluster_has_not_ended(world: World) -> None:
    backlog = 'prfaas_prefill_backlog_seconds{cluster="prfaas"}'
    assert await world.metric(backlog) == 0
    book = world.gateway.driver.dispatcher.load("prefill")
    book.dispatch("prefill", 1, 0, 3 * 10**9)
    assert await world.metric(backlog) == 3
    assert await world.metric(backlog.replace('prfaas"', 'pd"')) == 0
    book.done("prefill", 1, 10**9)
    assert await world.metric(backlog) == 0


async def test_what_links_hits_and_bytes_tell(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    plan = plan_file(tmp_path)
    text = plan.read_text()
    plan.write_text(text.replace('rtt = "10ms"', 'rtt = "10ms", price_per_tb = 50.0'))
    roles = {"decode": {"role": "decode"}, "spare": {"role": "prefill"}}
    tables = {"routing": {"plan": str(plan)}, "engines": roles}
    async with running(checkpoint, identities, tmp_path / "state", **tables) as world:
        world.spare.healthy = True
        await until(lambda: world.gateway.engines.by_name["spare"].is_ready)
        told = LinkTelemetry(
            age_ns=0,
            goodput_bits_per_s=80_000_000,
            rtt_ns=40_000_000,
            queued_bytes=0,
            in_flight_bytes=0,
            retransmits=0,
            delivery_bits_per_s=0,
            window_segments=0,
            num_connections=2,
        )
        link = '{destination="pd-pool",source="prfaas-pool"}'
        unknown = await world.metric(f"prfaas_route_link_rtt_seconds{link}")
        assert unknown is not None
        assert math.isnan(unknown)
        world.prfaas_pool.telemetry["pd-pool"] = told
        world.prfaas_pool.tell_state()
        await until(lambda: bool(world.gateway.pools.telemetry()))
        await world.post({"prompt": LONG, "max_tokens": 2})
        order = world.prefill.calls[0].body["kv_transfer_params"]["prfaas"]
        world.pd_pool.end_transfer(order["transfer"], num_bytes=2 * 10**9)
        await until_metric(world, f"prfaas_kv_bytes_total{link}", 2e9)
        expected = {
            f"prfaas_kv_cost_total{link}": 0.1,
            f"prfaas_route_link_up{link}": 1.0,
            f"prfaas_route_link_goodput_bytes_per_second{link}": 1e7,
            f"prfaas_route_link_rtt_seconds{link}": 0.04,
            f"prfaas_route_link_promised_bytes{link}": 0.0,
            f"prfaas_offload_threshold_tokens{link}": 100.0,
            "prfaas_prefix_lookup_tokens_total": 360.0,
            'prfaas_prefix_hit_tokens_total{cluster="pd"}': 0.0,
            'prfaas_engine_role{engine="spare",role="prefill"}': 1.0,
            'prfaas_engine_role{engine="decode",role="prefill"}': 0.0,
            "prfaas_loops_frozen": 0.0,
        }
        async with world.http.get(f"{world.url}/console/api/state") as response:
            seen = (await response.json())["sample"]["links"]["prfaas-pool>pd-pool"]
        assert (seen["kv_bytes"], seen["cost"]) == (2 * 10**9, pytest.approx(0.1))
        for sample, value in expected.items():
            assert await world.metric(sample) == pytest.approx(value), sample
        assert world.gateway.driver.split is not None
        assert Role.PREFILL in world.gateway.driver.split.roles.all


async def until_metric(world: World, sample: str, value: float) -> None:
    while await world.metric(sample) != value:  # noqa: ASYNC110 - nobody signals it
        await asyncio.sleep(0.001)


# --- dashboards and alerts ---


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_what_is_asked_for_is_there(where: str, expression: str) -> None:
    asked = re.findall(r"\b(prfaas_[a-z0-9_]+|up)(?:\{([^}]*)\})?", expression)
    assert asked, where
    labels: set[str] = set()
    for name, matchers in asked:
        assert name in KNOWN or name == "up", f"{where}: {name}"
        known = KNOWN.get(name, set()) | SCRAPED
        used = set(re.findall(r"([a-z_]+)\s*(?:=~|!~|!=|=)", matchers))
        assert used <= known, f"{where}: {name} has no {used - known}"
        labels |= known
    for words in re.findall(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)", expression):
        grouped = {word.strip() for word in words.split(",") if word.strip()}
        assert grouped <= labels, f"{where}: {grouped - labels}"


def test_every_alert_says_what_to_do() -> None:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}, rule["alert"]
            assert rule["labels"]["severity"] in ("page", "ticket")
            assert set(rule["annotations"]) == {"summary", "description", "runbook"}


def test_panels_have_places_and_units_and_do_not_overlap() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place: dict[str, Any] = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
