"""Keys and values within the pages of vLLM's cache, for codecs that treat them differently.

The order of tokens and heads follows from the cache's layout; whether a token's key lies before its
value is up to the attention backend. Sources, vLLM 0.32, `v1/attention/backends`: `flash_attn.py`,
`triton_attn.py` and `flex_attention.py` split a token's content at the size of a key. So does
`flashinfer.py` except with NVFP4; it is left out until that was seen on a device. `cpu_attn.py`
packs keys for its instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from prfaas.core.kv.blocks import KvPage
from prfaas.core.kv.canonical.parts import LayerParts

KEY_THEN_VALUE = frozenset({"FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION"})
"""Backends that keep a token's key and value of a head side by side."""


def backend_of(vllm_config: Any) -> str:
    """Return the attention backend that the engine was told to use; empty if it chooses itself."""
    found = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    return str(getattr(found, "name", found or ""))


def kv_pages(
    specs: Sequence[Any], layers: Sequence[LayerParts], backend: str
) -> tuple[KvPage, ...]:
    """Return where keys and values are in a block; nothing if they cannot be told apart.

    Args:
        specs: vLLM's description of each layer of a group, repeated like `layers`.
        layers: Parts of each page of a block.
        backend: Attention backend of the engine.
    """
    if backend not in KEY_THEN_VALUE:
        return ()
    pages = [_page(spec, parts) for spec, parts in zip(specs, layers, strict=True)]
    if None in pages:
        return ()
    joined = [(page, sum(1 for _ in same)) for page, same in groupby(pages)]
    return tuple(page._replace(layers=count) for page, count in joined if page is not None)


def _page(spec: Any, parts: LayerParts) -> KvPage | None:
    if len(parts) != 1 or parts[0].name != "kv" or parts[0].dtype != "bfloat16":
        return None
    heads = parts[0].sections[0].units
    # A block may have the tokens of several pages.
    tokens = parts[0].num_bytes // (heads * (spec.head_size + spec.head_size_v) * 2)
    page = KvPage(1, tokens, heads, spec.head_size, spec.head_size_v, parts[0].outer > 1)
    return page if page.num_bytes == parts[0].num_bytes else None
