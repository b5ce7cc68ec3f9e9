"""An engine whose ranks do not share memory does not start; one whose ranks do, starts.

`tests/engines/test_rank_reports.py` has the reports and refusals without an engine.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.engines.vllm_modules import needing_vllm
from tests.live.apart_rank import start

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1800)]


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")
def test_a_rank_with_shared_memory_of_its_own_is_refused_at_start(tmp_path: Path) -> None:
    needing_vllm("vllm")
    serves, log = start(tmp_path, apart=True)
    assert not serves
    assert "ConfigError: rank 1 of 2 is not in the shared memory of" in log, log[-3000:]
    assert "the ranks of an engine have to be on one host" in log


def test_ranks_that_share_memory_start(tmp_path: Path) -> None:
    needing_vllm("vllm")
    serves, log = start(tmp_path, apart=False)
    assert serves, log[-3000:]
