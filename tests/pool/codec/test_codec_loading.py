"""Kernels of codecs cost memory and time: only a node with blocks to code loads them."""

import logging
import secrets
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.core.codec.codecs import EXPONENT_WINDOW, LinkCodec
from prfaas.core.kv.blocks import Layout, Plane
from prfaas.pool.codec.loading import Kernels, Window
from prfaas.wire.messages.link import Decodes, PoolHello, Resumed
from tests.pool.conftest import World
from tests.pool.sites import LAYOUT, Peer, Site, dial, until


class CountedKernels(Kernels):
    """Kernels that count how often they are imported."""

    num_imports = 0

    def _import(self) -> Window | None:
        self.num_imports += 1
        return super()._import()


@pytest.fixture
def kernels(world: World) -> CountedKernels:
    world.kernels = made = CountedKernels()
    return made


def layout_of(dtype: str) -> Layout:
    groups = [replace(g, planes=(Plane(dtype, g.block_bytes),)) for g in LAYOUT.groups]
    return replace(LAYOUT, groups=tuple(groups))


async def offering(site: Site, identities: Path) -> Peer:
    """A source that can code."""
    peer = await dial(site, identities, "prfaas-pool")
    link = secrets.token_hex(8)
    peer.channel.send(PoolHello(pool="prfaas-pool", epoch="e", link=link, codecs=[EXPONENT_WINDOW]))
    await until(lambda: bool(peer.of(Resumed)))
    return peer


def test_the_modules_of_a_pool_node_import_no_compiler() -> None:
    script = "import sys, prfaas.pool.node.node; print('numba' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert found.stdout == b"False\n"


async def test_the_first_engine_with_blocks_to_code_loads_the_kernels_once(
    world: World, kernels: CountedKernels
) -> None:
    site = await world.start_pd(link_codec=LinkCodec.AUTO)
    peer = await offering(site, world.identities)
    await world.engine("pd-pool")
    await until(lambda: site.node.link_room.layouts.group(LAYOUT.layout_id, 0) is not None)
    site.node.link_room.layouts.learn(layout_of("float32"))
    assert kernels._thread is None
    assert not peer.of(Decodes)

    for _ in range(3):
        site.node.link_room.layouts.learn(layout_of("bfloat16"))
    await until(lambda: bool(peer.of(Decodes)))

    assert kernels.num_imports == 1
    assert site.metric("codec_bytes_per_second", direction="received") > 0
    again = await offering(site, world.identities)
    await until(lambda: bool(again.of(Decodes)))
    assert len(peer.of(Decodes)) == kernels.num_imports == 1
    for each in (peer, again):
        each.pinging.cancel()
        each.channel.close("the test is over")


class NoKernels(Kernels):
    """Of a host without numba."""

    @property
    def names(self) -> list[str]:
        return []


async def test_a_node_without_the_extra_says_so_to_those_who_would_code(world: World) -> None:
    world.kernels = NoKernels()
    site = await world.start_pd(link_codec=LinkCodec.AUTO)
    peer = await offering(site, world.identities)
    await until(lambda: bool(peer.of(Decodes)))
    assert peer.of(Decodes) == [Decodes(codecs=[])]
    peer.pinging.cancel()
    peer.channel.close("the test is over")


async def test_a_sender_logs_that_a_peer_decodes_nothing(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    world.kernels = NoKernels()
    await world.start_pd(link_codec=LinkCodec.AUTO)
    world.kernels = Kernels()
    await world.start("prfaas-pool", link_codec=LinkCodec.ALWAYS)
    await until(lambda: "peer_without_codecs" in caplog.text)
    assert "install 'prfaas[codecs]' at the peer" in caplog.text


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("pd-pool", {"link_codec": LinkCodec.RAW}),
        ("pd-pool", {"link_codec": LinkCodec.AUTO, "sources": frozenset()}),
    ],
    ids=["raw", "no link"],
)
async def test_a_node_whose_links_cannot_code_loads_none(
    world: World, kernels: CountedKernels, name: str, settings: dict[str, object]
) -> None:
    site = await world.start(name, **settings)
    site.node.link_room.layouts.learn(layout_of("bfloat16"))
    assert kernels._thread is None


def test_nothing_is_kept_for_kernels_that_failed() -> None:
    kernels = Kernels("prfaas.no_such_package")
    ready: list[int] = []
    kernels.load(lambda: ready.append(1))
    assert kernels._thread is not None
    kernels._thread.join(60)
    kernels.load(lambda: ready.append(1))
    assert not kernels._waiting
    assert not ready
