"""The reference of the scenario file, written from its types.

python -m prfaas.sim.scenario.reference > docs/scenario-file.md
"""

from __future__ import annotations

from enum import Enum
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from prfaas.config.governance.scenario_regions import ResidencyTable
from prfaas.config.market.prices import PriceTable
from prfaas.config.reference import section
from prfaas.market.scenario import RevocationTable
from prfaas.planner.answer.plan_file import BitsPerSecond, Seconds
from prfaas.sim.scenario.scenario_file import (
    CacheTable,
    FailureTable,
    HostsTable,
    PlacementTable,
    ScenarioFile,
    ScenarioLinkTable,
    ScenarioRoutingTable,
    ScenarioSloTable,
    SignalsTable,
)
from prfaas.sim.workloads.make import WorkloadTable

INTRODUCTION = """# The scenario file

TOML, for [`prfaas simulate`](simulator.md). Sizes, durations and rates are text with a unit:
"16GiB", "250ms", "10Gbps". Paths start at the directory of the file. Unknown keys are errors, and
so are keys that do not apply to the arrivals or the failure. `--set TABLE.KEY=VALUE`
changes one key. Scenarios to start from: [`examples/sim`](../examples/sim).

This page is written from the types in `src/prfaas/sim/scenario/scenario_file.py` and
`src/prfaas/sim/workloads/make.py`.
"""
TABLES: list[tuple[str, type[Any], tuple[str, ...]]] = [
    ("top level", ScenarioFile, ("title", "plan", "plan_settings", "seed")),
    ("[workload]", WorkloadTable, ()),
    ("[routing]", ScenarioRoutingTable, ()),
    ("[residency]", ResidencyTable, ()),
    ("[hosts]", HostsTable, ()),
    ("[link]", ScenarioLinkTable, ()),
    ("[cache]", CacheTable, ()),
    ("[placement]", PlacementTable, ()),
    ("[signals]", SignalsTable, ()),
    ("[slo]", ScenarioSloTable, ()),
    ("[prices.CLUSTER]", PriceTable, ()),
    ("[[revocation]]", RevocationTable, ()),
    ("[[failure]]", FailureTable, ()),
]


def reference() -> str:
    """The whole page, Markdown."""
    return "\n".join([INTRODUCTION, *(section(*table, _default) for table in TABLES)])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None or isinstance(value, BaseModel):
        return ""
    if field.metadata and field.metadata[0] in get_args(Seconds):
        return f'`"{value:g}s"`'
    if field.metadata and field.metadata[0] in get_args(BitsPerSecond):
        return f'`"{value / 1e9:g}Gbps"`'
    if isinstance(value, str):
        return f'`"{value.value if isinstance(value, Enum) else value}"`'
    return f"`{str(value).lower()}`"


if __name__ == "__main__":
    print(reference(), end="")
