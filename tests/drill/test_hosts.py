"""A short drill of a PD cluster of three hosts; `python -m tests.drill.hosts` is the large one."""

from pathlib import Path

import pytest

from .hosts import LINK, run
from .serving import Times


@pytest.mark.timeout(240)
async def test_clients_notice_nothing_of_a_lost_host(tmp_path: Path) -> None:
    lost = [LINK, "pool-a", "decode-c", "gateway"]
    times = Times(quiet_s=1.0, broken_s=2.0, restarts=False)
    rounds = await run(tmp_path, lost, per_s=8.0, times=times)
    assert {one.part: one.problems for one in rounds if one.problems} == {}
    assert min(len(one.calls) for one in rounds) > 15
    assert rounds[0].crossed, "no block went from one host to another"
