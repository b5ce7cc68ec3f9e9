"""Length of shared blocks, where it is a multiple of the engine's block size.

vLLM copies several blocks as one chunk (`blocks_per_chunk`). A chunk is a block for pool nodes and
other sites. Sites whose block sizes differ share blocks of a length that both sizes divide.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig

from prfaas.config.engines.block_tokens import SETTING, events_refused, length_refused
from prfaas.core.kv.blocks import GroupKind
from prfaas.errors import ConfigError

_CHUNKS = ("blocks_per_chunk", "block_size")
"""vLLM's own settings of chunks."""


def set_chunk(vllm_config: Any, kv_cache_config: KVCacheConfig) -> None:
    """Set the blocks of a chunk from the length of shared blocks, if that is set.

    Both sides of the connector, scheduler and workers, need it before vLLM reads its settings.

    Raises:
        ConfigError: Blocks of this length cannot be made of the engine's.
    """
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    tokens = extra.get(SETTING)
    if tokens is None:
        return
    if not isinstance(tokens, int) or tokens < 1:
        raise ConfigError(f"kv_connector_extra_config.{SETTING} is {tokens!r}: a number of tokens")
    given = [name for name in _CHUNKS if name in extra]
    sizes = _block_sizes(kv_cache_config)
    if given and extra.get("blocks_per_chunk") != tokens // max(sizes):
        raise ConfigError(f"{SETTING} and {given[0]} both set the length of blocks; give one")
    if sizes == {tokens}:
        return
    if len(sizes) > 1:
        raise ConfigError(
            f"{SETTING} is {tokens}, but the cache groups of this model have blocks of "
            f"{sorted(sizes)} tokens; only groups of one size can be combined"
        )
    [size] = sizes
    if tokens % size:
        raise ConfigError(length_refused(tokens, size, extra.get("prfaas_engine", "this engine")))
    events = vllm_config.kv_events_config
    if events is not None and events.enable_kv_cache_events:
        raise ConfigError(events_refused(tokens, size))
    if vllm_config.cache_config.prefix_match_unit is not None:
        raise ConfigError(
            f"--prefix-match-unit makes hits within a block, but {SETTING} = {tokens} is "
            f"{tokens // size} blocks of {size} tokens; leave one of them out"
        )
    extra["blocks_per_chunk"] = tokens // size


def _block_sizes(kv_cache_config: KVCacheConfig) -> set[int]:
    return {
        int(kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size)
        for group in kv_cache_config.prefix_cacheable_group_ids
    }


def refuse_kinds(kinds: set[GroupKind], blocks_per_chunk: int) -> None:
    """Refuse cache groups whose blocks were not seen to be combined.

    Raises:
        ConfigError: There is one.
    """
    if blocks_per_chunk > 1 and GroupKind.SLIDING_WINDOW in kinds:
        raise ConfigError(
            f"{SETTING} combines {blocks_per_chunk} blocks, which is not supported for sliding "
            "windows and chunked-local attention: vLLM frees a part of such a block; give all "
            "sites the same --block-size"
        )
