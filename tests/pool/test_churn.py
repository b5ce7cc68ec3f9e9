"""A pool node's memory stays within its limit, whatever goes through it."""

from pathlib import Path

import pytest

from benchmarks.pool.churn import MIB, Settings, churn

LIMIT, DISK = 64 * MIB, 128 * MIB


@pytest.mark.timeout(120)
def test_memory_stays_within_its_limit(tmp_path: Path) -> None:
    """The benchmark of the same name, with 300 MB instead of 10 GB."""
    source_and_sink = churn(Settings(tmp_path, LIMIT, DISK), 300_000_000)
    for pool in source_and_sink:
        assert pool.memory.anonymous <= LIMIT + 64 * MIB
        assert pool.at_end['prfaas_pool_used_bytes{tier="disk"}'] <= DISK
        assert pool.at_end["prfaas_pool_blocks_spilled_total"] > 0
        assert pool.at_end['prfaas_pool_used_bytes{tier="host"}'] <= LIMIT
    sink, source = source_and_sink
    committed = 'prfaas_transfers_total{direction="%s",state="committed"}'
    assert sink.at_end[committed % "received"] == source.at_end[committed % "sent"] >= 5
