"""The names of SGLang that the backend imports: of its tree if that is there, else stand-ins.

The stand-ins have the fields of SGLang 0.5.23 (`sglang/srt/mem_cache/hicache_storage.py`); with the
tree, `test_names.py` compares them. SGLang's configuration is always a stand-in: it is published by
a server with a GPU.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.engines.sglang.tree import TREE, open_tree

STORAGE = "sglang.srt.mem_cache.hicache_storage"
CONTEXT = "sglang.srt.runtime_context"


@dataclass
class HiCacheStorageConfig:
    """SGLang's, with the defaults of a single rank."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    is_page_first_layout: bool = False
    model_name: str | None = "tiny"
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None

    @property
    def is_storage_writer(self) -> bool:
        return not self.is_mla_model or self.tp_rank == self.dcp_rank


@dataclass
class HiCacheStorageExtraInfo:
    prefix_keys: list[str] | None = None
    extra_info: dict[str, Any] | None = None


class PoolHitPolicy(str, Enum):  # noqa: UP042 - as SGLang has it
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: str
    host_indices: Any = None
    device_indices: Any = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    nodes_to_load: list[Any] | None = None
    indices_from_pool: str | None = None
    block_pages: int = 0
    group_pages: int = 0


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None

    @classmethod
    def empty(cls) -> PoolTransferResult:
        return cls(0, {})


class HiCacheStorage:
    """Base of storage backends."""


NAMES = (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)
BACKEND = "prfaas.engines.sglang.backend"


class Bag:
    """A namespace of SGLang's configuration (`_ConfigBag`)."""

    def __init__(self, **values: Any) -> None:
        self._subs = {name: value for name, value in values.items() if isinstance(value, Bag)}
        self._fields = {name: value for name, value in values.items() if name not in self._subs}

    def __getattr__(self, name: str) -> Any:
        return self._fields[name]

    def put(self, name: str, value: Any) -> None:
        self._fields[name] = value


class Context:
    """SGLang's configuration in a process (`RuntimeContext`)."""

    def __init__(self, **bags: Bag) -> None:
        self.bags = bags

    def config_bag(self, name: str) -> Bag:
        if name not in self.bags:
            raise ValueError(f"namespace {name!r} not published")
        return self.bags[name]


def install(context: Context) -> None:
    """Make SGLang's names importable in this process."""
    if TREE is not None:
        open_tree(TREE)
        # Of its many functions the storage needs one; the module imports most of a server.
        for name in ("sglang.srt.utils", "sglang.srt.utils.common"):
            sys.modules[name] = ModuleType(name)
        sys.modules["sglang.srt.utils.common"].human_readable_int = int  # type: ignore[attr-defined]
    else:
        for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
            package = ModuleType(name)
            package.__path__ = []
            sys.modules[name] = package
        storage = ModuleType(STORAGE)
        for each in NAMES:
            setattr(storage, each.__name__, each)
        sys.modules[STORAGE] = storage
    published: Any = ModuleType(CONTEXT)
    published.get_context = lambda: context
    published.get_serving = lambda: context.config_bag("serving")
    sys.modules[CONTEXT] = published


def remove() -> None:
    """Forget what `install` made, and the backend that was imported with it."""
    for name in list(sys.modules):
        if name.split(".")[0] == "sglang" or name == BACKEND:
            del sys.modules[name]


def sglang() -> Any:
    """The module of SGLang's storage interface."""
    module = sys.modules.get(STORAGE)
    if module is None:
        import importlib

        module = importlib.import_module(STORAGE)
    return SimpleNamespace(**vars(module))
