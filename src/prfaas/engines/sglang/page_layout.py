"""The cache groups of an SGLang engine, and its hello to the pool node.

Ranks of tensor parallelism are processes with a host memory each, and a page of a rank has the
heads of that rank. So each rank's part of a page is a cache group of its own: a page is usable
where every rank has its part, which is what the pool node and the gateway require of groups
anyway. The latent pages of MLA are the same at all ranks and are one group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prfaas.core.kv.blocks import CacheGroup, GroupKind, HashScheme, Layout, Plane, facts_id
from prfaas.engines.sglang.host_rows import HostRows
from prfaas.engines.sglang.shapes import KV, MAMBA
from prfaas.errors import ConfigError
from prfaas.wire.messages.engine import EngineHello
from prfaas.wire.messages.fields import GROUPS_MAX
from prfaas.wire.messages.layouts import layout_spec


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The layout of all ranks, and the groups of this one.

    Attributes:
        own: This rank's group by pool.
    """

    layout: Layout
    own: Mapping[str, int]


def page_layout(
    facts: Mapping[str, str], pools: Mapping[str, Any], rows: Mapping[str, HostRows], config: Any
) -> PageLayout:
    """Return the layout of an engine; the same at all its ranks.

    Args:
        facts: Facts of the layout id.
        pools: SGLang's host pools by name.
        rows: Where their pages lie.
        config: SGLang's `HiCacheStorageConfig`.

    Raises:
        ConfigError: Pages of different pools differ in tokens, or there are too many ranks.
    """
    tokens = {rows[name].page_tokens for name in pools if name != MAMBA}
    if len(tokens) != 1:
        raise ConfigError(f"pools with pages of {sorted(tokens)} tokens; all need the same")
    page_tokens = tokens.pop()
    groups: list[CacheGroup] = []
    own: dict[str, int] = {}
    for name in sorted(pools, key=lambda pool: (pool != KV, pool)):
        is_one = config.is_mla_model and name != MAMBA
        num, rank = (1, 0) if is_one else (config.tp_size, config.tp_rank)
        own[name] = len(groups) + rank
        kind = GroupKind.LINEAR_STATE if name == MAMBA else GroupKind.FULL_ATTENTION
        size = rows[name].page_bytes
        planes = (Plane(str(pools[name].dtype).removeprefix("torch."), size),)
        groups += [
            CacheGroup(len(groups) + at, kind, page_tokens, size, planes=planes)
            for at in range(num)
        ]
    if len(groups) > GROUPS_MAX:
        raise ConfigError(f"{len(groups)} parts of a page; the limit is {GROUPS_MAX}")
    layout = Layout(facts_id(facts), page_tokens, "", tuple(groups), HashScheme.SGLANG_PAGES)
    return PageLayout(layout, own)


def hello_of(
    engine: str, made: PageLayout, pool: str, rows: HostRows, facts: dict[str, str], model: str
) -> EngineHello:
    """Return the first message about the memory of one host pool.

    Args:
        engine: Name of the engine, as the pool node knows this memory.
        pool: Name of the host pool.
        rows: Where its pages lie.
        facts: Facts of the layout id.
    """
    group = made.own[pool]
    return EngineHello(
        engine=engine,
        layout=layout_spec(made.layout),
        row_bytes=rows.stride,
        num_rows=rows.num_pages,
        extents={group: list(rows.parts)},
        facts=facts,
        model=model,
        row_span=rows.span,
        elsewhere=[each.index for each in made.layout.groups if each.index != group],
    )


def engine_name(engine: str, pool: str, tp_rank: int) -> str:
    """Return the name under which a rank's memory is known: rank 0's is the engine's own."""
    name = engine if tp_rank == 0 else f"{engine}.tp{tp_rank}"
    return name if pool == KV else f"{name}.{pool}"
