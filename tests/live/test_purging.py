"""Real engines forget what they hold."""

from __future__ import annotations

from typing import Any

import pytest

from tests.live.conftest import Live, document

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="session"),
]


async def purge(live: Live) -> dict[str, Any]:
    url = f"{live.url}/control/purge"
    async with live.http.post(url, json={"source": "prfaas-pool"}) as reply:
        report: dict[str, Any] = await reply.json()
        assert reply.status == 200, report
        return report


async def held(live: Live, text: str) -> dict[str, int]:
    """Tokens of a chat that each pool node and engine holds."""
    return {name: found["hit_tokens"] for name, found in (await live.look(text)).items()}


async def test_after_a_purge_real_engines_have_forgotten_what_came(live: Live) -> None:
    text = "Purge this. " + document(3000, start=800)
    _, headers = await live.chat(text)
    assert headers["X-Prfaas-Path"] == "remote"
    before = await held(live, text)
    assert before["pd-pool"] > 0
    report = await purge(live)
    assert report["is_complete"], report
    amounts = {pool["name"]: pool["num_blocks"] for pool in report["pools"]}
    assert amounts["pd-pool"] > 0
    after = await held(live, text)
    assert after["pd-pool"] == 0
