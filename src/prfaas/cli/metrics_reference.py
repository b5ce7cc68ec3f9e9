"""Writes `docs/metrics.md` from the registries: python -m prfaas.cli.metrics_reference.

A test holds the page to the code, and the real `/metrics` to the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import click
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import Histogram, MetricWrapperBase

from prfaas.cli.parts.gateway_annexes import AnnexMetrics
from prfaas.gateway.telemetry.metrics import GatewayMetrics
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.process.process import annex_metrics

HEAD = """# Metrics

Prometheus text at `/metrics`: of the gateway at its own port, for operators (see [Operating a
gateway](operations.md)); of a pool node at its `--admin` address. Base units: seconds, bytes,
tokens. Every label is bounded by the deployment file or by a fixed set of words. Counters end in
`_total`; histograms have `_bucket`, `_sum` and `_count`. Metrics never contain prompts, salts or
keys.

[`dashboards/grafana.json`](../dashboards/grafana.json) is a dashboard,
[`dashboards/alerts.yml`](../dashboards/alerts.yml) has alert rules for Prometheus. A test compares
both with this page. Scrape both kinds of parts:

```yaml
rule_files: [alerts.yml]
scrape_configs:
  - job_name: prfaas-gateway
    static_configs: [{targets: ["gateway.example.net:8000"]}]
    authorization: {credentials_file: operator.key}   # where gateway.operator_keys are set
  - job_name: prfaas-pool
    static_configs: [{targets: ["127.0.0.1:7180"]}]
```

All parts that `prfaas up` runs on a host are in `targets.json` in its `state` directory, with the
labels `job`, `part` and `cluster`: [`examples/prometheus.yml`](../examples/prometheus.yml) scrapes
all of it (`file_sd_configs`). Only its user can read the directory: run Prometheus as the same
user, or copy the file. Admin ports of pool nodes are the same at every start
([`admin`](deployment-file.md)).

An engine's own metrics are vLLM's. This page is written from the code by
`python -m prfaas.cli.metrics_reference`.
"""


@dataclass(frozen=True, slots=True)
class Described:
    """A metric."""

    name: str
    """Without the suffixes of its samples."""
    kind: str
    """"counter", "gauge" or "histogram"."""
    labels: tuple[str, ...]
    what: str
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, +Inf left out."""

    @property
    def samples(self) -> tuple[str, ...]:
        """Names of its samples."""
        match self.kind:
            case "counter":
                return (f"{self.name}_total",)
            case "histogram":
                return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
            case _:
                return (self.name,)


def described(registry: CollectorRegistry) -> Iterator[Described]:
    """The metrics of a registry, by name."""
    found = {
        collector
        for collector in registry._names_to_collectors.values()
        if isinstance(collector, MetricWrapperBase)
    }
    for metric in sorted(found, key=lambda metric: metric._name):
        bounds = metric._upper_bounds[:-1] if isinstance(metric, Histogram) else ()
        yield Described(
            metric._name,
            str(metric._type),
            tuple(metric._labelnames),
            metric._documentation.rstrip("."),
            tuple(bounds),
        )


def gateway_metrics() -> list[Described]:
    """Metrics of a gateway."""
    registry = GatewayMetrics().registry
    AnnexMetrics(registry)
    return list(described(registry))


def pool_metrics() -> list[Described]:
    """Metrics of a pool node."""
    metrics = PoolMetrics()
    annex_metrics(metrics)
    return list(described(metrics.registry))


def reference() -> str:
    """The page."""
    parts = [HEAD, "## Gateway\n", *_table(gateway_metrics())]
    parts += ["\n## Pool node\n", *_table(pool_metrics())]
    return "\n".join(parts) + "\n"


def _table(metrics: list[Described]) -> list[str]:
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        name = metric.samples[0] if metric.kind == "counter" else metric.name
        buckets = f"; buckets {_numbers(metric.buckets)}" if metric.buckets else ""
        rows.append(f"| `{name}` | {metric.kind} | {labels} | {metric.what}{buckets} |")
    return rows


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)


if __name__ == "__main__":
    click.echo(reference(), nl=False)
