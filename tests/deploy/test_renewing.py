"""Identities of all pods of two sites are replaced while requests are served."""

import tempfile
from pathlib import Path

import pytest

from .renewing import RENEWED_WITHIN_S, renewed_under_load

pytestmark = pytest.mark.timeout(300)


async def test_new_identities_are_in_use_within_a_minute_and_break_nothing() -> None:
    with tempfile.TemporaryDirectory(prefix="prfaas") as folder:
        outcome = await renewed_under_load(Path(folder), rate_per_s=4, after_s=2)
    assert outcome.errors == []
    assert set(outcome.transfers) == {"committed"}
    # Each remote request is a transfer, which both of its ends count.
    assert outcome.transfers["committed"] == 2 * outcome.paths["remote"]
    assert outcome.around > 0
    assert len(outcome.in_use_s) == 5
    assert max(outcome.in_use_s.values()) < RENEWED_WITHIN_S
