"""A short version of `python -m tests.drill.shared_service`."""

from pathlib import Path

import pytest

from .shared_service import drill
from .shared_site import SITES


@pytest.mark.timeout(300)
async def test_two_sites_share_a_cluster_by_contract(tmp_path: Path) -> None:
    found = await drill(tmp_path, seconds=6.0, slower=2.0)

    # In six seconds a site has some twenty requests: one more or less is 5 %.
    assert abs(found.shares - SITES["a"]) < 0.1, found
    assert abs(found.cheated - SITES["a"]) < 0.1, found
    assert found.statuses.get(429, 0) > 0, found
    assert found.cross_hits == 0 < found.own_hits, found
    assert found.foreign_names == 0, found
    assert all(found.num_names.values()), found
    assert found.peers == {site: [f"pd-{site}-pool"] for site in SITES}, found
    assert found.revoked_s < 30, found
    assert found.num_b > 0 == found.failed_b, found
