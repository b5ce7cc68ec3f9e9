"""A storage backend of SGLang's hierarchical cache: pages are blocks of a pool node.

    python -m sglang.launch_server --model-path MODEL --page-size 64 --enable-hierarchical-cache \
        --hicache-mem-layout page_first_direct --hicache-io-backend direct \
        --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
            "backend_name": "prfaas", "module_path": "prfaas.engines.sglang.backend",
            "class_name": "PrfaasStorage", "interface_v1": 1, "allocator": "shm",
            "prfaas_engine": "NAME", "prfaas_pool": "/path/to/pool.sock"}'

SGLang calls a backend from its threads for prefetch and backup. Whatever happens to the pool node,
a call returns within its time limit, and what was not done is a miss. Only the start is refused,
with the reason (`page_layout.py`).

SGLang's pools besides that of attention need either every page of a prefix, or only its last ones,
as a recurrent state does. A prefix can be restored if every pool can restore it.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult

from prfaas.engines.lineage import Lineage
from prfaas.engines.pool_client import LIMITS, ClientLimits
from prfaas.engines.sglang import facts
from prfaas.engines.sglang.page_layout import (
    KV,
    HostRows,
    check_features,
    check_nodes,
    check_pools,
    check_ranks,
    engine_name,
    hello_of,
    host_rows,
    page_layout,
)
from prfaas.engines.sglang.pool_calls import CALL_KEYS_MAX, PoolCalls
from prfaas.errors import ConfigError
from prfaas.wire.messages.fields import Key, Name

log = logging.getLogger(__name__)


WAIT_S = 2.0
"""Default time limit of a call: a page is looked up or copied in milliseconds."""
_OF_SGLANG = "backend_name, module_path, class_name, interface_v1, allocator"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the backend."""

    prfaas_pool: Annotated[str, msgspec.Meta(min_length=1)]
    """The pool node's unix socket."""
    prfaas_engine: Name
    """Name of the engine in the deployment."""
    prfaas_wait_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = WAIT_S
    """Time limit of a call, seconds; afterwards its pages are missing."""
    prfaas_unproven_pools: bool = False
    """Accept models with state or windows besides full attention."""
    interface_v1: int | bool = 0
    """Has to be set: SGLang copies pages itself otherwise."""

    @property
    def pool(self) -> Path:
        """The pool node's unix socket."""
        return Path(self.prfaas_pool)


def read_settings(extra_config: Mapping[str, Any] | None) -> Settings:
    """Return the settings in SGLang's `extra_config`; ConfigError if one is missing, unknown or out
    of its range."""
    found = dict(extra_config or {})
    unknown = [name for name in found if name.startswith("prfaas_")]
    unknown = [name for name in unknown if name not in Settings.__struct_fields__]
    try:
        settings = msgspec.convert(found, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"--hicache-storage-backend-extra-config: {error}; it needs {_OF_SGLANG}, prfaas_pool "
            "and prfaas_engine (docs/sglang.md)"
        ) from None
    if unknown:
        raise ConfigError(
            f"--hicache-storage-backend-extra-config: there is no {', '.join(sorted(unknown))}; "
            f"there are {', '.join(n for n in Settings.__struct_fields__ if 'prfaas' in n)}"
        )
    if not settings.interface_v1:
        raise ConfigError(
            'add "interface_v1": 1 to --hicache-storage-backend-extra-config: pages are copied '
            "between SGLang's memory and the pool node, and not through arguments"
        )
    return settings


@dataclass(frozen=True, slots=True)
class PoolHits:
    """Pages that a pool besides attention has."""

    has: Sequence[bool]
    """For each page whether the pool has it."""
    trailing: int = 0
    """The last pages of a prefix that are needed; 0 if all are."""

    def restorable(self, num_pages: int) -> set[int]:
        """Lengths, pages, up to `num_pages` that this pool can restore."""
        if not self.trailing:
            return set(range(1, leading(self.has[:num_pages]) + 1))
        found, run = set[int](), 0
        for length, has in enumerate(self.has[:num_pages], start=1):
            run = run + 1 if has else 0
            if run >= min(self.trailing, length):
                found.add(length)
        return found


@dataclass(frozen=True, slots=True)
class SglangPrefixHits:
    """Result of a query, as SGLang's `PoolTransferResult` has it."""

    num_pages: int
    """The longest prefix that all pools can restore."""
    by_pool: dict[str, int]
    """The longest that each can, 0 left out; a pool that was not reached is left out."""
    restorable: list[int]
    """All lengths that all pools can restore."""


def leading(flags: Sequence[bool]) -> int:
    """Return the number of leading True."""
    return next((at for at, flag in enumerate(flags) if not flag), len(flags))


def prefix_hits(has: Sequence[bool], name: str, others: Mapping[str, PoolHits]) -> SglangPrefixHits:
    """Return the prefixes that can be restored.

    Args:
        has: For each page whether attention has it.
        name: Name of the pool of attention.
        others: The other pools that are needed.

    References:
        SGLang 0.5.23, `HiCacheFile.batch_exists_v2`.
    """
    num = leading(has)
    by_pool = {name: num} if num else {}
    restorable = list(range(1, num + 1))
    for other, hits in others.items():
        if not restorable:
            break
        found = hits.restorable(num)
        if found:
            by_pool[other] = max(found)
        restorable = [length for length in restorable if length in found]
    return SglangPrefixHits(restorable[-1] if restorable else 0, by_pool, restorable)


_HASH = re.compile(r"[0-9a-f]{64}\Z")
Move = Callable[[str, list[str], list[Key], list[int], Any], list[bool]]
"""Stores or loads pages: pool, page hashes, keys, pages, and SGLang's extra information."""


class PrfaasStorage(HiCacheStorage):
    """SGLang's `HiCacheStorage` with a pool node as storage; ConfigError if the settings, the ranks
    or the version cannot be used.

    Args:
        storage_config: SGLang's `HiCacheStorageConfig` of this rank.
        options: Further arguments of SGLang's factory; not used.
        limits: Times and limits of the connection to the pool node.
    """

    def __init__(
        self, storage_config: Any, options: Any = None, limits: ClientLimits = LIMITS
    ) -> None:
        self._settings = read_settings(storage_config.extra_config)
        self._version = facts.check_version()
        check_ranks(storage_config)
        self._config, self._limits = storage_config, limits
        self._pools: dict[str, Any] = {}
        self._rows: dict[str, HostRows] = {}
        self._groups: dict[str, int] = {}
        self._calls: dict[str, PoolCalls] = {}
        self._lineage: Lineage[str] = Lineage()
        self._lineage_lock = threading.Lock()
        """SGLang prefetches and stores on threads of their own."""
        self._weights, self._is_replaced = _weight_version(), False

    # --- start and end ---

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the host pool of attention."""
        self._register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take a host pool of another part of the model; ConfigError if the model has more than
        full attention."""
        self._register(str(host_pool_name), host_pool)

    def _register(self, name: str, pool: Any) -> None:
        accepts = self._settings.prfaas_unproven_pools
        check_pools([name], accepts_unproven=accepts)
        if self._calls and self._pools.get(name) is not pool:
            raise ConfigError(f"the host pool {name!r} came after the layout was announced")
        self._pools[name] = pool

    def on_host_pools_registered(self) -> None:
        """Announce this rank's memory to the pool node; ConfigError if its pages cannot be
        shared."""
        if self._calls:
            return
        check_nodes(facts.num_nodes())
        values = facts.resolved_configuration()
        check_features(values)
        config, settings = self._config, self._settings
        self._rows = {name: host_rows(pool, name) for name, pool in self._pools.items()}
        pages = facts.page_facts(self._pools, self._rows, config)
        known, model = facts.all_facts(self._version, values, pages)
        made = page_layout(known, self._pools, self._rows, config)
        self._groups = dict(made.own)
        for name, rows in self._rows.items():
            engine = engine_name(settings.prfaas_engine, name, config.tp_rank)
            hello = hello_of(engine, made, name, rows, known, model)
            self._calls[name] = PoolCalls(
                settings.pool, hello, rows.descriptor, settings.prfaas_wait_s, self._limits
            )
        log.info("KV layout %s: model %s", made.layout.layout_id.hex()[:12], model)

    def close(self) -> None:
        """End the connections."""
        for calls in self._calls.values():
            calls.close()

    @property
    def is_connected(self) -> bool:
        """Return True if the pool node has accepted the memory of all host pools."""
        return bool(self._calls) and all(calls.is_connected for calls in self._calls.values())

    # --- queries ---

    def exists(self, key: str) -> bool:
        """Return True if the pool node has a page of attention."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return the number of leading pages that the pool node has."""
        return leading(self._have(KV, keys))

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Return the prefixes that all pools can restore."""
        transfers = list(pool_transfers or [])
        if any(each.hit_policy not in _POLICIES for each in transfers):
            return PoolTransferResult.empty()
        names = [KV, *(str(each.name) for each in transfers)]
        flags = self._have_all(names, keys)
        others = {
            each.name: PoolHits(
                has, max(1, len(each.keys or ())) if each.hit_policy == _TRAILING else 0
            )
            for each, has in zip(transfers, flags[1:], strict=True)
        }
        found = prefix_hits(flags[0], KV, others)
        return PoolTransferResult(found.num_pages, found.by_pool, found.restorable)

    def _have(self, pool: str, keys: Sequence[str]) -> list[bool]:
        return self._have_all([pool], keys)[0]

    def _have_all(self, pools: Sequence[str], hashes: Sequence[str]) -> list[list[bool]]:
        """For each pool and page whether the pool node has it, by one lookup."""
        num = len(hashes)
        none = [[False] * num for _ in pools]
        known = all(pool in self._groups for pool in pools)
        if not known or KV not in self._calls or self._is_stale():
            return none
        keys = [key for pool in pools for key in self._keys(pool, hashes)]
        if len(keys) != num * len(pools):
            # A hash that is none ends the prefix; the pages before it are looked up.
            whole = leading([bool(_HASH.match(each)) for each in hashes])
            short = self._have_all(pools, hashes[:whole]) if whole < num else none
            return [has + [False] * (num - len(has)) for has in short]
        found = self._calls[KV].look_up(keys)
        return [found[at * num : (at + 1) * num] for at in range(len(pools))]

    # --- copies ---

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Copy pages of attention into host memory."""
        return self._move(self._load, KV, keys, host_indices, extra_info)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Keep pages of attention."""
        return self._move(self._store, KV, keys, host_indices, extra_info)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """Copy pages of several pools into host memory."""
        return self._move_all(self._load, transfers, extra_info)

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """Keep pages of several pools."""
        return self._move_all(self._store, transfers, extra_info)

    def _move_all(self, move: Move, transfers: Any, extra_info: Any) -> dict[str, list[bool]]:
        return {
            each.name: self._move(
                move, str(each.name), each.keys or [], each.host_indices, extra_info
            )
            for each in transfers
        }

    def _move(
        self, move: Move, pool: str, hashes: list[str], host_indices: Any, extra_info: Any
    ) -> list[bool]:
        """Move the pages of one pool; what is malformed or too much moves nothing."""
        none, rows = [False] * len(hashes), self._rows.get(pool)
        if rows is None or host_indices is None or pool not in self._calls or self._is_stale():
            return none
        pages = rows.pages(host_indices.tolist(), len(hashes))
        keys = self._keys(pool, hashes)
        if pages is None or len(keys) != len(hashes) or len(keys) > CALL_KEYS_MAX:
            log.error("%d pages of %s with indices or names of others", len(hashes), pool)
            return none
        return move(pool, hashes, keys, pages, extra_info) if keys else none

    def _load(
        self, pool: str, hashes: list[str], keys: list[Key], pages: list[int], extra_info: Any
    ) -> list[bool]:
        loaded, sources = self._calls[pool].load(keys, pages)
        # Later pages are of these sources, too. Without the names before them that is unknown, and
        # all that is stored from now on counts.
        with self._lineage_lock:
            self._lineage.loaded(hashes if _prefix(extra_info) is not None else (), sources)
        return loaded

    def _store(
        self, pool: str, hashes: list[str], keys: list[Key], pages: list[int], extra_info: Any
    ) -> list[bool]:
        with self._lineage_lock:
            sources = self._lineage.sources({*(_prefix(extra_info) or ()), *hashes})
        return [self._calls[pool].store(keys, pages, sources)] * len(keys)

    def _keys(self, pool: str, hashes: Sequence[str]) -> list[Key]:
        """Keys of pages; fewer if a hash is none."""
        group = self._groups[pool]
        return [(group, bytes.fromhex(each)) for each in hashes if _HASH.match(each)]

    def _is_stale(self) -> bool:
        """Return True if the model's weights were replaced while it served."""
        if not self._is_replaced and _weight_version() != self._weights:
            self._is_replaced = True
            log.error("the weights were replaced: no page is shared any more; start SGLang again")
        return self._is_replaced

    # --- what SGLang calls without interface_v1 ---

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Return None: pages are copied to host indices only."""
        return None

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> Any:
        """Return None for each page: pages are copied to host indices only."""
        return [None] * len(keys)

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Return False: pages are copied from host indices only."""
        return False

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Return False: pages are copied from host indices only."""
        return False

    def clear(self) -> bool:
        """Return False: other engines use the pages as well, and the operator purges them."""
        log.warning("pages at the pool node stay; `prfaas ctl purge POOL` drops them")
        return False


_TRAILING = PoolHitPolicy.TRAILING_PAGES
_POLICIES = (PoolHitPolicy.ALL_PAGES, _TRAILING)


def _prefix(extra_info: Any) -> list[str] | None:
    """Names of the pages before those of a call, if SGLang passes them."""
    found: list[str] | None = getattr(extra_info, "prefix_keys", None)
    return found


def _weight_version() -> str | None:
    """Return SGLang's version of the weights, which an update in place changes."""
    from sglang.srt.runtime_context import get_serving

    version: str | None = get_serving().weight_version
    return version
