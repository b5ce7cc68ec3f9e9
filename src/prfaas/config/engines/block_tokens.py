"""Length of shared blocks: `[model] block_tokens` of a deployment file, and what it excludes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import lcm

from prfaas.config.engine_args import size_of

SETTING = "prfaas_block_tokens"
"""Key of `kv_connector_extra_config` that has the length, tokens."""
BLOCK_SIZE = ("--block-size",)
BLOCK_TOKENS_MAX = 1 << 20


def length_refused(tokens: int, size: int, engine: str) -> str:
    """Return the reason to refuse a length that is no multiple of an engine's block size."""
    return (
        f"blocks of {tokens} tokens cannot be made of blocks of {size} at {engine}: {tokens} is no "
        f"multiple of {size}; take {-(-tokens // max(size, 1)) * size}, or another --block-size"
    )


def events_refused(tokens: int, size: int) -> str:
    """Return the reason to refuse KV events of an engine whose blocks are combined."""
    return (
        f"KV events of an engine with blocks of {size} tokens do not name shared blocks of "
        f"{tokens}; leave its KV events out (kv_events, --kv-events-config)"
    )


def check_block_tokens(engines: Mapping[str, tuple[list[str], bool]], tokens: int | None) -> None:
    """See that blocks of a length can be made of the blocks of engines; ValueError if they cannot.

    Args:
        engines: Arguments of each engine, and True if its KV events are subscribed to.
        tokens: Length of shared blocks; None if it is not set.
    """
    if tokens is None:
        return
    refused = []
    for name, (args, has_events) in engines.items():
        size = size_of(args, BLOCK_SIZE, tokens)
        if not size or tokens % size:
            refused.append(length_refused(tokens, size, name))
        elif size != tokens and has_events:
            refused.append(f"{name}: {events_refused(tokens, size)}")
    if refused:
        raise ValueError(f"model.block_tokens: {'; '.join(refused)}")


def common_length(sizes: Iterable[str]) -> str:
    """Return the advice for engines with different block sizes."""
    numbers = [int(size) for size in sizes if size.isdecimal() and int(size)]
    least = f" (the least is {lcm(*numbers)})" if numbers else ""
    return (
        "blocks of different lengths have different names; set block_tokens of [model] to a "
        f"common multiple{least}"
    )
