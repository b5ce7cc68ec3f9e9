"""Storages that pages are compared with: SGLang's own `HiCacheFile`, or a dictionary."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from tests.engines.sglang.host_pools import HostPool
from tests.engines.sglang.names import STORAGE, HiCacheStorageConfig, PoolHitPolicy


def hicache_file(directory: Path, pools: dict[str, HostPool]) -> Any:
    """SGLang's storage in files."""
    module = importlib.import_module(STORAGE)
    made = module.HiCacheFile(HiCacheStorageConfig(), str(directory))
    for name, pool in pools.items():
        made.register_mem_host_pool_v2(pool, name)
    return made


class Dictionary:
    """The behaviour of `HiCacheFile`, for CI without SGLang's tree."""

    def __init__(self, pools: dict[str, HostPool]) -> None:
        self._pools = pools
        self._pages: dict[tuple[str, str], Any] = {}

    def clear(self) -> bool:
        self._pages.clear()
        return True

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return next((i for i, key in enumerate(keys) if ("kv", key) not in self._pages), len(keys))

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {each.name: self._each(each, self._set) for each in transfers}

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {each.name: self._each(each, self._get) for each in transfers}

    def _each(self, transfer: Any, move: Any) -> list[bool]:
        pool, keys = self._pools[transfer.name], transfer.keys or []
        indices = transfer.host_indices
        if indices is None or indices.numel() != len(keys) * pool.page_size:
            return [False] * len(keys)
        firsts = indices.tolist()[:: pool.page_size]
        return [move(transfer.name, key, at) for key, at in zip(keys, firsts, strict=True)]

    def _set(self, name: str, key: str, index: int) -> bool:
        self._pages.setdefault((name, key), self._pools[name].get_data_page(index))
        return True

    def _get(self, name: str, key: str, index: int) -> bool:
        page = self._pages.get((name, key))
        if page is not None:
            self._pools[name].set_from_flat_data_page(index, page)
        return page is not None

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> tuple[int, dict[str, int], list[int]]:
        num = self.batch_exists(keys)
        hits, restorable = {"kv": num} if num else {}, set(range(1, num + 1))
        for each in pool_transfers or []:
            if not restorable:
                break
            has = [(each.name, key) in self._pages for key in keys]
            last = each.hit_policy == PoolHitPolicy.TRAILING_PAGES.value
            width = max(1, len(each.keys or ()))
            found = {
                length
                for length in range(1, num + 1)
                if all(has[max(0, length - width) if last else 0 : length])
            }
            if found:
                hits[each.name] = max(found)
            restorable &= found
        return max(restorable, default=0), hits, sorted(restorable)


def plain(result: Any) -> tuple[int, dict[str, int], list[int]]:
    """A `PoolTransferResult` in plain data; names of pools are text."""
    if isinstance(result, tuple):
        return result
    hits = {str(getattr(name, "value", name)): n for name, n in result.extra_pool_hit_pages.items()}
    return result.kv_hit_pages, hits, list(result.restorable_prefix_pages or [])


def flags(result: dict[Any, list[bool]]) -> dict[str, list[bool]]:
    """Flags by name of the pool."""
    return {str(getattr(name, "value", name)): found for name, found in result.items()}
