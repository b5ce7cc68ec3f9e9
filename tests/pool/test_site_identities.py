"""Pool nodes and gateways that are admitted by their site, without a list entry for each."""

from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.wire.identity import make_authority, make_identity

from .conftest import World
from .sites import PROMPT, subscribe, until

ADMITS = {
    "sources": frozenset({"site/prfaas/pool/*"}),
    "gateways": frozenset({"site/pd/gateway/*"}),
}


@pytest.fixture
def identities(tmp_path: Path) -> Path:
    """Identities that carry their sites."""
    directory = tmp_path / "identities"
    make_authority(directory)
    for name, site in (
        ("gateway", "pd/gateway"),
        ("pd-pool", "pd/pool"),
        ("prfaas-pool", "prfaas/pool"),
    ):
        make_identity(directory, name, site=site)
    return directory


async def test_blocks_travel_between_parts_that_no_list_names(world: World) -> None:
    _, pd, prefill, decode = await world.two_sites(**ADMITS)
    gateway = await subscribe(pd, world.identities)
    transfer = prefill.push()
    assert await prefill.store(PROMPT, transfer)
    prefill.push_done(transfer)
    await until(lambda: pd.metric("transfers_total", direction="received", state="committed"))
    assert await decode.load(PROMPT) == [True] * len(PROMPT)
    assert not gateway.closed
    gateway.channel.close("the test is over")


async def test_a_pool_of_another_site_may_not_push(world: World) -> None:
    pd = await world.start_pd(**(ADMITS | {"sources": frozenset({"site/other/pool/*"})}))
    await world.start("prfaas-pool")
    await until(lambda: pd.metric("connections_refused_total", port="link") >= 1)
    assert not pd.node.inbound.channels.is_connected("prfaas-pool")
