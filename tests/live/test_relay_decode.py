"""Relay decode with real engines: the words are those of one, whatever token is the last of the
relay."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.live.first_tokens import LETTERS, WAYS, compare, running, settings

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3000)]
REQUESTS, OUTPUT_TOKENS = 12, 300
ALWAYS = 'relay_decode = "always"\n'
SLOW = '\n[clusters.prfaas.pools.prfaas-pool.links.pd-pool]\nbudget = "40Mbps"\n'


async def test_the_words_are_those_of_one_engine(tmp_path: Path) -> None:
    """Greedy answers as well: in float32 tokens that are computed as a prompt are the same."""
    draw, found = random.Random(37), []
    async with running(settings(ALWAYS) + SLOW, tmp_path) as live:
        for number in range(REQUESTS):
            extra = WAYS[number % len(WAYS)] | {"allowed_token_ids": LETTERS}
            extra |= {"max_tokens": OUTPUT_TOKENS}
            length = draw.randrange(1200, 1600)
            found.append(await compare(live, draw, extra, length, stream=True))
        assert await live.metric(live.url, "prfaas_requests_in_flight") == 0
    told = [(a.record["relayed_tokens"], a.record["num_output_tokens"]) for a in found]
    print(told, [a.record["gap_ms"] for a in found])
    assert [asked for asked in found if not asked.is_same] == []
    assert {asked.record["fallback"] for asked in found} == {None}
    assert any(0 < relayed < made - 1 for relayed, made in told), "none was handed over"
