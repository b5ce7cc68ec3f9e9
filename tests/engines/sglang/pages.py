"""Pages that tests of the backend store and ask for."""

from __future__ import annotations

from typing import Any

from tests.engines.sglang import names

HASHES = [bytes([n]).hex() * 32 for n in range(16)]


def kept(engine: Any, num: int = 4) -> list[bytes]:
    """Store the first pages; their bytes."""
    pool = engine.pools["kv"]
    made = [pool.fill(page, HASHES[page]) for page in range(num)]
    assert engine.batch_set_v1(HASHES[:num], pool.indices(list(range(num)))) == [True] * num
    return made


def all_missing(engine: Any) -> None:
    """Every call says that nothing is there."""
    transfer = names.sglang().PoolTransfer(
        name="kv", host_indices=engine.pools["kv"].indices([0, 1]), keys=HASHES[:2]
    )
    assert not engine.exists(HASHES[0])
    assert engine.batch_exists(HASHES) == 0
    found = engine.batch_exists_v2(HASHES, [])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (0, {})
    for move in (engine.batch_get_v1, engine.batch_set_v1):
        assert move(HASHES[:2], transfer.host_indices) == [False, False]
    for move_all in (engine.batch_get_v2, engine.batch_set_v2):
        assert move_all([transfer]) == {"kv": [False, False]}
