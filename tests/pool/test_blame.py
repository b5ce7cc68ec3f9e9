"""Two sources and a shared prefix: the one that altered it is barred, whoever is verified."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from prfaas.core.kv.blocks import BlockKey
from prfaas.core.kv.naming.hash_chain import hash_chain
from prfaas.core.kv.shipping import manifest_digest, manifest_of
from prfaas.integrity.metrics import VerificationMetrics
from prfaas.integrity.received import Received
from prfaas.integrity.received import View as Reports
from prfaas.integrity.verifier import Verifier
from prfaas.wire.fragments import block_digest
from prfaas.wire.messages.comparing import Compare, Compared
from prfaas.wire.messages.engine import Push, Store
from prfaas.wire.messages.fields import Key, keys_of, wire_keys
from tests.integrity.views import View

from .conftest import World
from .sites import (
    EXTENTS,
    LAYOUT,
    LOOPBACK,
    ROW_BYTES,
    Engine,
    Peer,
    Site,
    content,
    seal,
    subscribe,
    until,
)

HOSTILE, HONEST = "prfaas-pool", "stranger"
PREFIX_TOKENS, TOKENS = 64, list(range(128))
SALT = "tenant"
HASHES = hash_chain(TOKENS, tokens_per_hash=16, seed="0", cache_salt=SALT)


@dataclass
class Gateway:
    """A verifier with a real pool node, and the bars of sources."""

    pd: Site
    peer: Peer
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    barred: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    stopped: list[Reports] = field(default_factory=list)
    compared: list[tuple[Key, Key]] = field(default_factory=list)

    def stop(self, view: Reports, _: str) -> None:
        self.stopped.append(view)

    async def compute(self, engine: str, token_ids: Sequence[int], salt: str) -> bool:
        """Store what an honest engine computes, under the names of a salt."""
        names = hash_chain(list(token_ids), tokens_per_hash=16, seed="0", cache_salt=salt)
        for span in ((0, PREFIX_TOKENS), (PREFIX_TOKENS, len(TOKENS))):
            for ours, theirs in zip(keys(*span), keys(*span, names), strict=True):
                data = content(ours)
                digest = block_digest(LAYOUT.layout_id, theirs, data)
                assert self.pd.node.store.put(LAYOUT.layout_id, theirs, data, digest)
        return True

    async def compare(
        self,
        pool: str,
        layout_id: bytes,
        pairs: Sequence[tuple[Key, Key]],
        limits: Mapping[str, float],
    ) -> Compared:
        self.compared += pairs
        job = len(self.compared)
        message = Compare(job=job, layout_id=layout_id, pairs=list(pairs), limits=dict(limits))
        self.peer.channel.send(message)

        def answers() -> list[Compared]:
            return [m for m in self.peer.messages if isinstance(m, Compared) and m.job == job]

        await until(answers)
        return answers()[0]

    async def bar(self, source: str, why: str) -> None:
        self.barred.append(source)

    def alarm(self, why: str) -> None:
        self.alarms.append(why)

    def suspect(self, source: str, why: str) -> None:
        self.alarms.append(f"{source}: {why}")

    async def verify(self, source: str, have_tokens: int) -> None:
        metrics = VerificationMetrics(self.registry)
        # Blocks of these tests have bytes of no type.
        limits = {"bytes": 0.5}
        site: Any = self
        verifier = Verifier(
            1,
            limits,
            site,
            site,
            metrics,
            pause_s=0,
        )
        verifier.used(
            Received(
                "pd-pool",
                frozenset({source}),
                [View(source=source)],
                "decode",
                LAYOUT,
                TOKENS,
                HASHES,
                SALT,
                have_tokens,
                len(TOKENS),
            )
        )
        while verifier._tasks:
            await asyncio.gather(*verifier._tasks)


def keys(have_tokens: int, end: int, hashes: Sequence[bytes] = HASHES) -> list[BlockKey]:
    blocks = manifest_of(LAYOUT, hashes, have_tokens=have_tokens, final_tokens=end)
    return keys_of(
        [
            (group, names[at : at + 32])
            for group, names in blocks.items()
            for at in range(0, len(names), 32)
        ]
    )


async def ship(
    engine: Engine, pd: Site, source: str, blocks: list[BlockKey], *, is_altered: bool, of: str = ""
) -> None:
    """Compute blocks, from those of a pool if `of` is one, and push them."""
    rows = engine.fill(blocks)
    if is_altered:
        for row, key in enumerate(blocks):
            engine.memory[row * ROW_BYTES + EXTENTS[key.group][0][0]] ^= 1
    transfer = secrets.token_bytes(16)
    named: dict[int, bytes] = {}
    for key in blocks:
        named[key.group] = named.get(key.group, b"") + key.block_hash
    changes = {"source": source, "blocks": manifest_digest(named)}
    sealed = seal(engine.identities, transfer, **changes)  # type: ignore[arg-type]
    before = pd.metric("transfers_total", direction="received", state="committed")
    engine.send(Push(transfer_id=transfer, peer="pd-pool", ticket=sealed, blocks=named))
    store = Store(
        job=engine.job(),
        keys=wire_keys(blocks),
        rows=rows,
        transfer_id=transfer,
        pushed=[True] * len(blocks),
        sources=[of] if of else [],
    )
    assert (await engine.finish(store)).ok
    engine.push_done(transfer)
    await until(
        lambda: pd.metric("transfers_total", direction="received", state="committed") > before
    )


@dataclass
class Sites:
    pd: Site
    gateway: Gateway
    hostile: Engine
    honest: Engine


@pytest.fixture
async def sites(world: World, identities: Path) -> Sites:
    pd = await world.start_pd(sources=frozenset({HOSTILE, HONEST}))
    first = await world.start(HOSTILE)
    second = await world.start(HONEST, peers={"pd-pool": (LOOPBACK, pd.port)})
    for site in (first, second):
        await until(lambda site=site: site.node.links["pd-pool"].is_up)  # type: ignore[misc]
    gateway = Gateway(pd, await subscribe(pd, identities))
    return Sites(pd, gateway, await world.engine(HOSTILE), await world.engine(HONEST))


async def test_a_prefix_that_another_source_altered_first_bars_that_source(sites: Sites) -> None:
    """Both ship the prefix; the altered version came first and was kept."""
    await ship(sites.hostile, sites.pd, HOSTILE, keys(0, PREFIX_TOKENS), is_altered=True)
    await ship(sites.honest, sites.pd, HONEST, keys(0, len(TOKENS)), is_altered=False)
    await sites.gateway.verify(HONEST, have_tokens=0)
    assert sites.gateway.barred == [HOSTILE]


async def test_a_source_that_computed_from_an_altered_prefix_is_not_barred(sites: Sites) -> None:
    """The PD pool had the prefix, and what was computed from it is wrong as well."""
    await ship(sites.hostile, sites.pd, HOSTILE, keys(0, PREFIX_TOKENS), is_altered=True)
    rest = keys(PREFIX_TOKENS, len(TOKENS))
    await ship(sites.honest, sites.pd, HONEST, rest, is_altered=True, of="pd-pool")
    await sites.gateway.verify(HONEST, have_tokens=PREFIX_TOKENS)
    assert sites.gateway.barred == [HOSTILE]


@pytest.mark.parametrize("of", ["", "pd-pool"])
async def test_a_source_that_alters_is_barred_also_if_it_claims_to_have_used_others_blocks(
    sites: Sites, of: str
) -> None:
    await ship(sites.honest, sites.pd, HONEST, keys(0, PREFIX_TOKENS), is_altered=False)
    rest = keys(PREFIX_TOKENS, len(TOKENS))
    await ship(sites.hostile, sites.pd, HOSTILE, rest, is_altered=True, of=of)
    await sites.gateway.verify(HOSTILE, have_tokens=PREFIX_TOKENS)
    assert (sites.gateway.barred, sites.gateway.alarms) == ([HOSTILE], [])


async def test_without_the_prefix_there_is_an_alarm_and_no_bar(sites: Sites) -> None:
    """A block before them may have been altered, and is gone."""
    rest = keys(PREFIX_TOKENS, len(TOKENS))
    await ship(sites.honest, sites.pd, HONEST, rest, is_altered=True, of="pd-pool")
    await sites.gateway.verify(HONEST, have_tokens=PREFIX_TOKENS)
    assert sites.gateway.barred == []
    assert len(sites.gateway.alarms) == 1


async def test_each_block_is_compared_once_and_its_computed_version_dropped(sites: Sites) -> None:
    await ship(sites.honest, sites.pd, HONEST, keys(0, len(TOKENS)), is_altered=False)
    await sites.gateway.verify(HONEST, have_tokens=0)
    assert len(sites.gateway.compared) == len(keys(0, len(TOKENS)))
    computed = {keys_of([second])[0] for _, second in sites.gateway.compared}
    assert not sites.pd.held() & computed
    assert (sites.gateway.barred, sites.gateway.alarms) == ([], [])
