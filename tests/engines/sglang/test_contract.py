"""The storage contract of SGLang: the same random traces on our backend and on another storage.

The pool node is real: its sockets, its copies, the shared memory of the host pools. The other
storage is SGLang's own `HiCacheFile` where its tree is unpacked (`tree.py`), and a dictionary.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.kv.naming.page_chain import page_chain
from tests.engines.sglang.conftest import Engines, PoolThread
from tests.engines.sglang.host_pools import HostPool
from tests.engines.sglang.names import sglang
from tests.engines.sglang.reference import Dictionary, flags, hicache_file, plain
from tests.engines.sglang.tree import needs_tree

PAGE, NUM_PAGES, CHAIN_PAGES = 16, 40, 12
STEPS = 120
OTHERS = ("mamba", "indexer")


def new_pools() -> dict[str, HostPool]:
    """A model with full attention, a state and a sidecar."""
    return {
        "kv": HostPool(PAGE, NUM_PAGES),
        "mamba": HostPool(1, NUM_PAGES, num_parts=1, part_bytes=200),
        "indexer": HostPool(PAGE, NUM_PAGES, num_parts=3, part_bytes=40, layout="layer_first"),
    }


def chains(rng: random.Random) -> list[list[str]]:
    """Page hashes of prompts, some with a common beginning, one of another tenant."""
    ids = [rng.randrange(2**17) for _ in range(PAGE * CHAIN_PAGES)]
    fork = [*ids[: PAGE * 5], *(rng.randrange(2**17) for _ in range(PAGE * (CHAIN_PAGES - 5)))]
    found = []
    for tokens, salt in ((ids, None), (fork, None), (ids, "tenant")):
        names = page_chain(tokens, tokens_per_page=PAGE, cache_salt=salt)
        found.append([name.hex() for name in names])
    return found


class Trace:
    """Draws calls, makes each at both storages, and compares answers and pages.

    Args:
        seed: Of the trace.
        ours: Our backend.
        theirs: The other storage.
        their_pools: Its host pools.
        clear: Drops all pages of ours.
    """

    def __init__(
        self,
        seed: int,
        ours: Any,
        theirs: Any,
        their_pools: dict[str, HostPool],
        clear: Callable[[], None],
    ) -> None:
        self.rng = random.Random(seed)
        self.chains = chains(self.rng)
        self.ours, self.theirs, self.their_pools, self.clear = ours, theirs, their_pools, clear
        self.names = sglang()
        self.answers: list[Any] = []

    def run(self, steps: int) -> None:
        kinds = [
            self.set,
            self.set,
            self.set_v1,
            self.exists,
            self.exists_v2,
            self.get,
            self.get_v1,
        ]
        for _ in range(steps):
            self.rng.choice(kinds)()
            if self.rng.random() < 0.02:
                self.clear()
                assert self.theirs.clear()

    def keys(self) -> list[str]:
        """Pages of a prompt: mostly from its begin, sometimes with holes."""
        chain = self.rng.choice(self.chains)
        start = self.rng.choice([0, 0, self.rng.randrange(CHAIN_PAGES)])
        keys = chain[start : start + self.rng.randrange(1, CHAIN_PAGES + 1)]
        if self.rng.random() < 0.3:
            keys = [key for key in keys if self.rng.random() < 0.7] or keys[:1]
        return keys

    def transfer(self, name: str, keys: list[str], *, fill: bool) -> tuple[Any, Any]:
        """The same transfer for both, on host pages of each; a few with indices of others."""
        pages = self.rng.sample(range(NUM_PAGES), len(keys))
        for key, page in zip(keys, pages, strict=True):
            for pool in (self.ours.pools[name], self.their_pools[name]):
                pool.fill(page, f"{name} {key}" if fill else f"before {self.rng.random()}")
        size = self.ours.pools[name].page_size
        if self.rng.random() < 0.05:
            size = max(1, size - 1)
        indices = self.ours.pools[name].indices(pages)[: size * len(keys)]
        if size == 1 and self.ours.pools[name].page_size == 1 and self.rng.random() < 0.05:
            indices = indices[:-1]
        made = self.names.PoolTransfer(name=name, host_indices=indices, keys=list(keys))
        return made, pages

    def transfers(self, *, fill: bool) -> tuple[list[Any], dict[str, list[int]]]:
        keys = self.keys()
        made: list[Any] = []
        pages: dict[str, list[int]] = {}
        for name in ("kv", *OTHERS):
            if self.rng.random() < 0.7:
                some = keys[-self.rng.randrange(1, 3) :] if name == "mamba" else keys
                transfer, pages[name] = self.transfer(name, some, fill=fill)
                made.append(transfer)
        return made, pages

    def set(self) -> None:
        made, _ = self.transfers(fill=True)
        self.same(flags(self.ours.batch_set_v2(made)), flags(self.theirs.batch_set_v2(made)))

    def set_v1(self) -> None:
        made, _ = self.transfer("kv", self.keys(), fill=True)
        ours = self.ours.batch_set_v1(made.keys, made.host_indices)
        self.same({"kv": ours}, flags(self.theirs.batch_set_v2([made])))

    def get(self) -> None:
        made, pages = self.transfers(fill=False)
        found = flags(self.ours.batch_get_v2(made))
        self.same(found, flags(self.theirs.batch_get_v2(made)))
        for name, has in found.items():
            self.same_pages(name, pages[name], has)

    def get_v1(self) -> None:
        made, pages = self.transfer("kv", self.keys(), fill=False)
        found = self.ours.batch_get_v1(made.keys, made.host_indices)
        self.same({"kv": found}, flags(self.theirs.batch_get_v2([made])))
        self.same_pages("kv", pages, found)

    def same_pages(self, name: str, pages: list[int], has: list[bool]) -> None:
        for page, found in zip(pages, has, strict=True):
            if found:
                ours, theirs = self.ours.pools[name].page(page), self.their_pools[name].page(page)
                assert ours == theirs

    def exists(self) -> None:
        keys = self.keys()
        self.same(self.ours.batch_exists(keys), self.theirs.batch_exists(keys))

    def exists_v2(self) -> None:
        keys, policies = self.keys(), self.names.PoolHitPolicy
        made = [
            self.names.PoolTransfer(
                name=name,
                keys=keys[: self.rng.randrange(3)],
                hit_policy=policies.TRAILING_PAGES if name == "mamba" else policies.ALL_PAGES,
            )
            for name in OTHERS
            if self.rng.random() < 0.7
        ]
        ours = plain(self.ours.batch_exists_v2(keys, made))
        self.same(ours, plain(self.theirs.batch_exists_v2(keys, made)))

    def same(self, ours: Any, theirs: Any) -> None:
        assert ours == theirs
        self.answers.append(ours)


def ran(seed: int, engines: Engines, node: PoolThread, theirs: Any, pools: Any) -> list[Any]:
    ours = engines.start(new_pools(), prfaas_unproven_pools=True)
    trace = Trace(seed, ours, theirs, pools, node.purge)
    trace.run(STEPS)
    node.check()
    for pool in pools.values():
        pool.close()
    return trace.answers


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", range(6))
def test_random_traces_have_the_answers_of_a_dictionary(
    seed: int, engines: Engines, pool_node: PoolThread
) -> None:
    pools = new_pools()
    answers = ran(seed, engines, pool_node, Dictionary(pools), pools)
    text = str(answers)
    # Hits, misses, partial prefixes and restorable lengths all occur.
    assert all(each in text for each in ("True", "False", "mamba", "indexer"))


@needs_tree
@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", range(10))
def test_random_traces_have_the_answers_of_sglangs_files(
    seed: int, engines: Engines, pool_node: PoolThread, tmp_path: Path
) -> None:
    pools = new_pools()
    ran(seed, engines, pool_node, hicache_file(tmp_path / "files", pools), pools)
