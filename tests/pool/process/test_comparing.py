"""Two versions of a block in a pool node: how much they differ, and which one stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.core.kv.blocks import BlockKey
from prfaas.wire.fragments import block_digest
from prfaas.wire.messages.comparing import Compare, Compared
from prfaas.wire.messages.fields import wire_keys
from tests.pool.conftest import World
from tests.pool.sites import LAYOUT, Peer, Site, content, subscribe, until

RECEIVED = [BlockKey(0, bytes([n]) * 32) for n in range(4)]
COMPUTED = [BlockKey(0, bytes([100 + n]) * 32) for n in range(4)]


async def ask(gateway: Peer, job: int = 1) -> Compared:
    pairs = list(zip(wire_keys(RECEIVED), wire_keys(COMPUTED), strict=True))
    gateway.channel.send(Compare(job=job, layout_id=LAYOUT.layout_id, pairs=pairs))

    def answers() -> list[Compared]:
        return [m for m in gateway.messages if isinstance(m, Compared) and m.job == job]

    await until(lambda: bool(answers()))
    return answers()[0]


def keep(site: Site, key: BlockKey, data: bytes) -> None:
    digest = block_digest(LAYOUT.layout_id, key, data)
    assert site.node.store.put(LAYOUT.layout_id, key, data, digest)


@pytest.mark.parametrize("is_altered", [False, True])
async def test_altered_blocks_differ_and_the_computed_version_is_dropped(
    world: World, identities: Path, *, is_altered: bool
) -> None:
    pd = await world.start("pd-pool")
    gateway = await subscribe(pd, identities)
    for received, computed in zip(RECEIVED, COMPUTED, strict=True):
        data = content(received)
        keep(pd, received, data)
        other = bytes(len(data)) if is_altered and received is RECEIVED[2] else data
        keep(pd, computed, other)
    found = await ask(gateway)
    assert (found.num_equal, found.num_different) == ((3, 1) if is_altered else (4, 0))
    assert bool(max(found.worst.values())) is is_altered
    store = pd.node.store
    assert all((LAYOUT.layout_id, key) in store for key in RECEIVED)
    assert not any((LAYOUT.layout_id, key) in store for key in COMPUTED)
    pd.check()


async def test_a_missing_version_is_named_and_what_was_compared_is_dropped(
    world: World, identities: Path
) -> None:
    pd = await world.start("pd-pool")
    gateway = await subscribe(pd, identities)
    for received, computed in list(zip(RECEIVED, COMPUTED, strict=True))[:3]:
        keep(pd, received, content(received))
        keep(pd, computed, content(received))
    keep(pd, RECEIVED[3], content(RECEIVED[3]))
    found = await ask(gateway)
    assert (found.num_equal, found.missing) == (3, [3])
    assert (LAYOUT.layout_id, COMPUTED[0]) not in pd.node.store
