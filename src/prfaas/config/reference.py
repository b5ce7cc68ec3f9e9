"""The reference of the deployment file, written from its types.

python -m prfaas.config.reference > docs/deployment-file.md
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from pydantic.fields import FieldInfo

from prfaas.config.clusters import (
    ClusterTable,
    EngineTable,
    LinkTable,
    PoolTable,
    S3Table,
    TimingTable,
)
from prfaas.config.deployment import Deployment, GatewayTable, ModelTable, SecurityTable
from prfaas.config.market.prices import ClassTable, PriceTable
from prfaas.config.quantities import DurationNs, SizeBytes
from prfaas.config.routing import RoutingTable
from prfaas.config.services import (
    AuditTable,
    KubernetesTable,
    MembershipTable,
    SupervisionTable,
    TracingTable,
)
from prfaas.config.tenants import OperatorTable, TenantTable
from prfaas.config.tiers.mooncake import MooncakeTable
from prfaas.units import format_seconds, format_size

INTRODUCTION = """# The deployment file

The deployment file is TOML. The same format describes one machine or several sites. Sizes and
durations are text with a unit: "16GiB", "250ms". Relative paths start at the working directory of
`prfaas`. Unknown keys are errors. `prfaas check FILE` validates a file. Examples:
[`examples/laptop.toml`](../examples/laptop.toml),
[`examples/two-sites.toml`](../examples/two-sites.toml).

This page is generated from the types in `src/prfaas/config/`.
"""
TABLES: list[tuple[str, type[Any], tuple[str, ...]]] = [
    ("top level", Deployment, ("state",)),
    ("[model]", ModelTable, ()),
    ("[gateway]", GatewayTable, ()),
    ("[routing]", RoutingTable, ()),
    ("[security]", SecurityTable, ()),
    ("[tracing]", TracingTable, ()),
    ("[audit]", AuditTable, ()),
    ("[supervision]", SupervisionTable, ()),
    ("[membership]", MembershipTable, ("folder",)),
    ("[membership.kubernetes]", KubernetesTable, ()),
    ("[tenants.TENANT]", TenantTable, ()),
    ("[operators.OPERATOR]", OperatorTable, ()),
    ("[classes.CLASS]", ClassTable, ()),
    ("[prices.CLUSTER]", PriceTable, ()),
    ("[clusters.CLUSTER]", ClusterTable, ("role", "region", "link_budget", "has_roles")),
    ("[clusters.CLUSTER.pools.POOL]", PoolTable, ()),
    ("[clusters.CLUSTER.pools.POOL.links.PEER]", LinkTable, ()),
    ("[clusters.CLUSTER.engines.ENGINE]", EngineTable, ()),
    ("[clusters.CLUSTER.s3]", S3Table, ()),
    ("[clusters.CLUSTER.mooncake]", MooncakeTable, ()),
    ("[clusters.CLUSTER.timing]", TimingTable, ()),
]


def reference() -> str:
    """The whole page, Markdown."""
    return "\n".join([INTRODUCTION, *(section(*table, _default) for table in TABLES)])


def section(
    title: str, table: type[Any], only: tuple[str, ...], default: Callable[[FieldInfo], str]
) -> str:
    """The keys of one table, Markdown.

    Args:
        table: Its type, a pydantic model.
        only: Keys that are shown; all if empty.
        default: How the default of a key is written.
    """
    fields: dict[str, FieldInfo] = table.model_fields
    rows = [
        f"| `{name}` | {default(fields[name])} | {_text(fields[name])} |"
        for name in fields
        if not only or name in only
    ]
    head = f"## `{title}`\n\n| key | default | meaning |\n|---|---|---|\n"
    return head + "\n".join(rows) + "\n"


def _text(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None:
        return ""
    if field.metadata and field.metadata[0] in get_args(SizeBytes):
        return f'`"{format_size(value).replace(".0 ", "").replace(" ", "")}"`'
    if field.metadata and field.metadata[0] in get_args(DurationNs):
        return f'`"{format_seconds(value).replace(".00 ", "").replace(" ", "")}"`'
    if isinstance(value, bool | int | float | list | dict):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`'


if __name__ == "__main__":
    print(reference(), end="")
