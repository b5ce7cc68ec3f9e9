"""A small drill in every run of the tests; `python -m tests.drill` is the large one."""

from pathlib import Path

import pytest

from .drill import Kind, run


@pytest.mark.timeout(240)
async def test_every_kind_of_fault_twice(tmp_path: Path) -> None:
    rounds = await run(tmp_path, 2 * len(Kind), seed=3)
    assert {one.kind: one.problems for one in rounds if one.problems} == {}
    survived = [one for one in rounds if one.kind in {Kind.CUT, Kind.RESET, Kind.CORRUPT}]
    assert sum(one.num_served for one in survived) > sum(one.num_blocks for one in survived) / 2
