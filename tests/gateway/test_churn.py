"""Random events of an API server under requests: no error, no late route, nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.core.membership.members import State

from .churn import churning, run
from .conftest import World


@pytest.mark.timeout(180)
async def test_engines_come_and_go_at_random_under_requests(world: World, tmp_path: Path) -> None:
    async with churning(world, tmp_path, 10, seed=16) as churn:
        await run(churn, 60)
        assert not churn.errors
        assert not churn.late
        assert not churn.remnants()
        assert churn.counts["requests"] > 10
        members = world.gateway.members.machine
        for name in churn.ports:
            wanted = State.SEEN if name in churn.remote else State.READY
            assert members.state_of(name) is wanted
