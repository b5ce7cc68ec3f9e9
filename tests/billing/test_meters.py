"""Meters: what they record is what their counters count."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from prfaas.billing.metrics import storage_counter
from prfaas.billing.storage_meter import RECORD_NS, TENANTS_MAX, StorageMeter


@dataclass
class Tier:
    """A tier whose contents a test sets."""

    used_bytes: int = 0
    held_bytes: dict[str, int] = field(default_factory=dict)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**40),
            st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(1, 2**34)),
            st.integers(0, 100 * 10**9),
        ),
        max_size=30,
    )
)
def test_storage_of_all_tenants_is_that_of_the_tier(
    steps: list[tuple[int, dict[str, int], int]],
) -> None:
    tier, written, registry = Tier(), list[Any](), CollectorRegistry()
    meter = StorageMeter({"host": tier}, written.append, storage_counter(registry), 0)
    now_ns = expected = 0
    for rest, held, passed_ns in steps:
        now_ns += passed_ns
        expected += tier.used_bytes * passed_ns
        tier.held_bytes, tier.used_bytes = held, rest + sum(held.values())
        meter.read(now_ns)
    meter.close(now_ns)
    assert sum(record["byte_ns"] for record in written) == expected
    counted = registry.get_sample_value("prfaas_usage_storage_byte_seconds_total", {"tier": "host"})
    assert abs((counted or 0) * 10**9 - expected) <= expected * 1e-12


def test_many_small_tenants_are_recorded_together() -> None:
    held = {f"tag-{number}": 1 + number for number in range(TENANTS_MAX + 500)}
    tier, written = Tier(sum(held.values()) + 5, held), list[Any]()
    meter = StorageMeter({"host": tier}, written.append, storage_counter(CollectorRegistry()), 0)
    meter.read(RECORD_NS)
    assert len(written) == TENANTS_MAX + 1
    assert sum(record["byte_ns"] for record in written) == tier.used_bytes * RECORD_NS
    assert {record["tenant"] for record in written} >= {"", f"tag-{TENANTS_MAX + 499}"}
