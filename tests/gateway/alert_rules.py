"""The rules and panels of dashboards/, and what they ask Prometheus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


RULES = ROOT / "dashboards" / "alerts.yml"


DASHBOARD = ROOT / "dashboards" / "grafana.json"


def expressions() -> Iterator[tuple[str, str]]:
    """Places with their PromQL expressions."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
