"""A short drill of serving in every run; `python -m tests.drill.serving` is the large one."""

from pathlib import Path

import pytest

from .serving import Kind, Times, run


@pytest.mark.timeout(240)
async def test_clients_notice_nothing(tmp_path: Path) -> None:
    kinds = [Kind.SLOW, Kind.CUT, Kind.DECODE_ENGINE, Kind.GATEWAY]
    times = Times(quiet_s=1.0, broken_s=2.0, restarts=False, until_late=True)
    rounds = await run(tmp_path, kinds, per_s=10.0, times=times, prefill=("prfaas-0",))
    assert {one.kind: one.problems for one in rounds if one.problems} == {}
    assert [one.num_wrong for one in rounds] == [0, 0, 0, 0]
    slow, _, decode, gateway = rounds
    assert min(len(one.calls) for one in rounds) > 20
    assert slow.late, "no remote path was left for being late"
    assert decode.moved, "no stream was under way when its engine was killed"
    assert gateway.retried, "no client was at the gateway that was killed"
