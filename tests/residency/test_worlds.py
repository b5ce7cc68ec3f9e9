"""No block is ever in a region that its tenant excludes, whatever gateways sign."""

from __future__ import annotations

from .worlds import run


def test_no_block_rests_in_or_crosses_to_a_region_that_its_tenant_excludes() -> None:
    # 10,000 of them: python -m tests.residency.worlds 10000
    seen = run(150)
    assert {"worlds", "local", "remote", "excluded", "moved", "kept from moving"} <= seen.keys()
