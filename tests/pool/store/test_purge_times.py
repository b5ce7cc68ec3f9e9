"""Blocks of before a purge are refused also from a pool node that did not drop them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from prfaas.core.cache.eviction import GRAIN_S
from prfaas.core.cache.keep_rules import SCOPES_MAX, KeepRules, Origin, PurgeTimes, Scope
from prfaas.pool.store.origins import LOCAL, UNKNOWN, received
from tests.orders import purge_end
from tests.pool.conftest import World
from tests.pool.purges import SOURCE, ask, ship
from tests.pool.sites import LAYOUT, PROMPT, subscribe, until

TENANT = "ab" * 16


class Clock:
    """Unix time that a test sets."""

    now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.timeout(60)
@pytest.mark.parametrize("scope", [{"source": SOURCE}, {"source": "", "tenant": ""}])
async def test_a_peer_that_kept_its_blocks_cannot_send_them_again(
    world: World, scope: dict[str, Any]
) -> None:
    """It was away during the purge, or answered and did nothing."""
    clock = Clock()
    pd = await world.start_pd(wall_s=clock)
    sender = await world.start("prfaas-pool", wall_s=clock)
    await world.linked(sender, pd)
    prefill = await world.engine("prfaas-pool")
    await ship(prefill, pd)
    clock.now_s += 2 * GRAIN_S

    gateway = await subscribe(pd, world.identities)
    assert (await ask(gateway, **scope)).num_blocks == len(PROMPT)
    gateway.channel.send(purge_end(job=2, **scope))
    await until(lambda: not pd.node.store.rules.orders)

    transfer = prefill.push()
    assert await prefill.store(PROMPT, transfer)  # The pool has them: they keep their age.
    prefill.push_done(transfer)
    labels = {"direction": "received", "state": "aborted"}
    await until(lambda: pd.metric("transfers_total", **labels) == 1)
    assert not pd.held()
    await until(lambda: sender.metric("transfers_total", direction="sent", state="aborted") == 1)
    for key in PROMPT:
        sender.node.store.discard(LAYOUT.layout_id, key)
    clock.now_s += GRAIN_S
    await ship(prefill, pd)
    assert pd.held() == set(PROMPT), "computed anew"
    gateway.channel.close("done")


def test_what_is_of_before_a_purge() -> None:
    rules = KeepRules("pd-pool")
    rules.purged(Scope("bad"), 1000.0)
    rules.purged(Scope(tenant=TENANT), 2000.0)
    old = received("bad", b"", TENANT, 980, is_inherited=False)

    assert not rules.may_read(old)
    assert not rules.may_read(Origin(tenant=TENANT, born_s=1980))
    assert not rules.may_read(received("good", b"", "", 980, is_inherited=True)), "of any"
    assert rules.may_read(Origin(tenant=TENANT, born_s=1995)), "perhaps of after it"
    assert rules.may_read(received("good", b"", "", 980, is_inherited=False))
    assert rules.may_read(replace(LOCAL, born_s=980))
    assert rules.may_read(UNKNOWN)


def test_a_purge_of_this_node_itself_is_of_all_that_it_has() -> None:
    rules = KeepRules("pd-pool")
    rules.purged(Scope("pd-pool"), 1000.0)

    assert not rules.may_read(replace(LOCAL, born_s=980))
    assert rules.may_read(replace(LOCAL, born_s=1000))


def test_scopes_are_bounded() -> None:
    times = PurgeTimes()
    for number in range(SCOPES_MAX + 5):
        times.note(Scope(f"pool-{number}"), 1000.0)

    assert len(times._sources) == SCOPES_MAX
