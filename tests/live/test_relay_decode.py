"""Relay decode with real engines: the words are those of one, whatever token is the last of the
relay."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.live.first_tokens import LETTERS, WAYS, compare, running, settings

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3000)]
REQUESTS, OUTPUT_TOKENS, TRANSFER_S = 12, 48, 2


async def test_the_words_are_those_of_one_engine(tmp_path: Path) -> None:
    """Greedy answers as well: in float32 tokens that are computed as a prompt are the same."""
    draw, found = random.Random(37), []
    async with running(settings('relay_decode = "always"\n'), tmp_path) as live:
        for number in range(REQUESTS + 2):
            before = live.relay.forwarded
            extra = WAYS[number % len(WAYS)] | {"allowed_token_ids": LETTERS}
            extra |= {"max_tokens": OUTPUT_TOKENS}
            asked = await compare(live, draw, extra, draw.randrange(1200, 1600), stream=True)
            if number == 0:
                live.relay.bytes_per_s = (live.relay.forwarded - before) // TRANSFER_S
            elif number > 1:  # By the second one it is known how slow the link is.
                found.append(asked)
        assert await live.metric(live.url, "prfaas_requests_in_flight") == 0
    assert [asked for asked in found if not asked.is_same] == []
    assert {asked.record["fallback"] for asked in found} == {None}
    print([(a.record["relayed_tokens"], a.record["why_not_relay"]) for a in found])
    assert sum(asked.record["relayed_tokens"] > 0 for asked in found) > REQUESTS / 2
