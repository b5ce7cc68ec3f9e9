"""Alert rules fire at the first event, and where series are absent."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter

from prfaas.cli.parts.gateway_annexes import AnnexMetrics
from prfaas.gateway.telemetry.metrics import GatewayMetrics
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.process.process import annex_metrics
from tests.gateway.alert_rules import RULES

COUNTED = re.compile(r"(?:rate|increase)\((prfaas_\w+)_total(?:\{([^}]*)\})?\[")
LABEL = re.compile(r'(\w+)(=~?|!=)"([^"]*)"')


def registries() -> dict[str, CollectorRegistry]:
    gateway, pool = GatewayMetrics().registry, PoolMetrics()
    AnnexMetrics(gateway)
    annex_metrics(pool)
    return {"gateway": gateway, "pool": pool.registry}


def counters(registry: CollectorRegistry) -> dict[str, Counter]:
    named = registry._names_to_collectors.items()
    return {n: c for n, c in named if isinstance(c, Counter)}


def test_what_an_alert_counts_exists_before_the_first_event() -> None:
    found: dict[str, Counter] = {}
    for registry in registries().values():
        found |= counters(registry)
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    asked = [(rule["alert"], *match) for rule in rules for match in COUNTED.findall(rule["expr"])]
    assert len(asked) > 8
    for alert, name, labels in asked:
        counter = found[name]
        samples = [s for m in counter.collect() for s in m.samples if s.name.endswith("_total")]
        assert all(s.value == 0 for s in samples)
        for label, operator, value in LABEL.findall(labels):
            if operator == "!=":
                continue
            for each in value.split("|"):
                seen = {s.labels[label] for s in samples}
                assert each in seen, f"{alert}: {name} has no series with {label}={each} at start"
        assert samples, f"{alert}: {name} has no series at start"


GATEWAY = {"series": "prfaas_requests_in_flight", "values": "0x30"}
FIRES: list[tuple[str, list[tuple[str, str]], bool]] = [
    ("PrfaasNoEngine", [('prfaas_engine_ready{engine="a",role="prfaas"}', "1x30")], True),
    (
        "PrfaasNoEngine",
        [
            ('prfaas_engine_ready{engine="a",role="prfaas"}', "1x30"),
            ('prfaas_engine_ready{engine="b",role="pd"}', "0x30"),
        ],
        True,
    ),
    (
        "PrfaasNoEngine",
        [
            ('prfaas_engine_ready{engine="b",role="pd"}', "0x30"),
            ('prfaas_engine_ready{engine="c",role="pd"}', "1x30"),
        ],
        False,
    ),
    (
        "PrfaasBlocksAltered",
        [('prfaas_verifications_total{outcome="altered"}', "0x20 1x10")],
        True,
    ),
    ("PrfaasBlocksAltered", [('prfaas_verifications_total{outcome="altered"}', "0x30")], False),
    (
        "PrfaasSharedTierUnreadable",
        [('prfaas_pool_shared_unreadable_total{reason="altered"}', "0x20 1x10")],
        True,
    ),
    ("PrfaasMembershipOld", [('prfaas_membership_fault{source="folder"}', "1x30")], True),
    ("PrfaasMembershipOld", [('prfaas_pool_membership_fault{source="folder"}', "1x30")], True),
    ("PrfaasMemberRefused", [('prfaas_members_refused{reason="duplicate_name"}', "2x30")], True),
    (
        "PrfaasNothingOffloaded",
        [
            ('prfaas_route_decisions_total{path="local",reason="engine_not_connected"}', "0+9x60"),
            ('prfaas_route_decisions_total{path="remote",reason="above_threshold"}', "0x60"),
        ],
        True,
    ),
    (
        "PrfaasRequestsFail",
        [
            ('prfaas_requests_total{path="local",outcome="failed"}', "0x20 1+1x10"),
            ('prfaas_requests_total{path="local",outcome="finished"}', "0+10x30"),
        ],
        True,
    ),
    (
        "PrfaasRequestsFail",
        [('prfaas_requests_total{path="local",outcome="finished"}', "0+10x30")],
        False,
    ),
]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(("alert", "series", "fires"), FIRES)
def test_a_rule_fires(
    alert: str, series: list[tuple[str, str]], fires: bool, tmp_path: Path
) -> None:
    given = [GATEWAY, *({"series": name, "values": values} for name, values in series)]
    expression = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)'
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": given,
                "promql_expr_test": [
                    {
                        "expr": expression,
                        "eval_time": "50m" if "60" in series[0][1] else "28m",
                        "exp_samples": [{"labels": "{}", "value": int(fires)}],
                    }
                ],
            }
        ],
    }
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump(test))
    command = [str(shutil.which("promtool")), "test", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
