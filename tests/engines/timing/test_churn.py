"""Timing engines that an API server lists come and go: right answers, and an index that is theirs.

`python -m tests.engines.timing.churn` is the same with 200 engines and 1,000 events.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gateway.churn import run

from .churn import churning


@pytest.mark.timeout(300)
async def test_the_index_is_the_content_of_the_engines_that_are_left(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with churning(tmp_path, checkpoint, identities, 8, 16, 0.1) as churn:
        await run(churn, 60)
        assert not churn.errors
        assert not churn.late
        assert not churn.remnants()
        assert churn.counts["requests"] > 10
        assert churn.counts["cached"]
        assert await churn.equal_index() > 0
