"""Hand-offs between engines that take no orders: the PD pool is asked to fetch the blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.kv.blocks import CacheGroup, GroupKind, HashScheme
from prfaas.gateway.serving.prefill_leg import Rehearsal
from prfaas.wire.messages.fields import PULL_KEYS_MAX
from tests.gateway.conftest import LAYOUT, running, until
from tests.gateway.prompts import LONG

ATTENTION = GroupKind.FULL_ATTENTION
PAGES = replace(
    LAYOUT, hash_scheme=HashScheme.SGLANG_PAGES, groups=(CacheGroup(0, ATTENTION, 16, 1024),)
)
TOKENS = replace(
    PAGES,
    tokens_per_hash=1,
    groups=tuple(CacheGroup(rank, ATTENTION, 1, 64) for rank in range(64)),
)
"""Pages of one token, and 64 ranks."""
TOO_MANY = {"stage": "prefill", "reason": "too_many_blocks"}


async def test_a_pool_that_is_away_is_the_reason(
    checkpoint: Path, identities: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(checkpoint, identities, tmp_path / "state", layout=PAGES) as world:
        client = world.gateway.pools.client("pd-pool")

        async def lost_meanwhile(*_: Any) -> bool:
            await world.pd_pool.stop()
            await until(lambda: client._channel is None)
            return False

        monkeypatch.setattr(Rehearsal, "is_refused", lost_meanwhile)
        status, _ = await world.post({"prompt": LONG, "max_tokens": 2})
        record = await world.record()
        assert (status, record["fallback"]) == (200, {"stage": "prefill", "reason": "pool_down"})
        assert world.prefill.calls == []
        assert world.pd_pool.pulls == []
        counted = 'prfaas_fallback_total{reason="pool_down",stage="prefill"}'
        assert await world.metric(counted) == 1


async def test_a_prompt_of_too_many_pages_is_computed_locally(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with running(checkpoint, identities, tmp_path / "state", layout=TOKENS) as world:
        assert len(TOKENS.groups) * (len(LONG) - 1) > PULL_KEYS_MAX
        status, _ = await world.post({"prompt": LONG, "max_tokens": 2})
        record = await world.record()
        assert (status, record["fallback"]) == (200, TOO_MANY)
        assert world.pd_pool.pulls == []
