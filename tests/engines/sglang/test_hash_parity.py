"""The hash chain of pages against SGLang's own functions, if its tree is there."""

from __future__ import annotations

import hashlib
import random
import sys
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.kv.naming.page_chain import page_chain
from tests.engines.sglang.tree import TREE, needs_tree

NUM_PAGES = 100_000


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[str]]]:
    """SGLang's `get_storage_hash_str`, with its native extension built from its source."""
    assert TREE is not None
    from torch.utils.cpp_extension import load

    source = TREE / "sglang/srt/mem_cache"
    native = load(
        name="hicache_hash_cpp",
        sources=[str(source / "cpp_utils/hash_binding.cpp")],
        extra_cflags=["-O1", "-std=c++17", "-w"],
        extra_ldflags=["-lcrypto"],
        with_cuda=False,
        build_directory=str(tmp_path_factory.mktemp("native")),
    )
    seed_of = _function(source / "utils.py", "storage_namespace_seed")

    def chain(ids: list[int], page: int, salt: str | None, extra: str | None) -> list[str]:
        seed = seed_of(extra, salt)
        parent = bytes.fromhex(seed) if seed else None
        return list(native.get_hash(array("q", ids), len(ids), 1, False, parent, page))

    yield chain
    sys.modules.pop("hicache_hash_cpp", None)


def _function(path: Path, name: str) -> Any:
    """One function of a module that cannot be imported without a GPU's kernels."""
    text = path.read_text()
    start = text.index(f"def {name}(")
    end = text.index("\ndef ", start + 1)
    found: dict[str, Any] = {"hashlib": hashlib}
    exec("from __future__ import annotations\n" + text[start:end], found)  # noqa: S102
    return found[name]


@needs_tree
@pytest.mark.timeout(600)
def test_a_hundred_thousand_pages_have_sglangs_names(theirs: Callable[..., list[str]]) -> None:
    rng, num = random.Random(7), 0
    while num < NUM_PAGES:
        page, pages = rng.choice([1, 2, 16, 32, 64]), rng.randrange(1, 2000)
        size = page * pages + rng.randrange(page)
        ids = [rng.choice([rng.randrange(2**32), rng.randrange(200_000)]) for _ in range(size)]
        salt, extra = rng.choice([None, "", "s", "ü" * 9]), rng.choice([None, "", "lora", "a\0b"])
        found = page_chain(ids, tokens_per_page=page, cache_salt=salt, extra_key=extra)
        assert [each.hex() for each in found] == theirs(ids, page, salt, extra)[:pages]
        num += pages
