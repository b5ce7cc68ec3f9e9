"""The matrix of models: a hand-off of every kind of KV cache is what one engine computes alone.

    python -m pytest -m "engine or nightly" tests/live/test_kinds.py -s  # with the table

One kind runs with the other tests; the others are marked nightly.
"""

from __future__ import annotations

import pytest

from tests.live.identity_by_kind import run
from tests.live.model_kinds import ALL_KINDS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]
ALWAYS = "sinks and windows (gpt-oss)"


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == ALWAYS else pytest.mark.nightly) for kind in ALL_KINDS],
)
async def test_a_hand_off_gives_the_tokens_and_logprobs_of_one_engine(kind: str) -> None:
    """Blocks of every group are shipped and loaded, and have the planner's bytes."""
    row = await run(kind)
    print(row.line())  # With -s: the table of docs/results/models.md.
    assert not row.faults, row.faults
