"""Blocks of a prompt that a transfer ships, and their bytes."""

from __future__ import annotations

from prfaas.core.kv.blocks import CacheGroup, GroupKind, Layout
from prfaas.core.kv.checkpoints import num_checkpoints


def is_worth_sending(
    group: CacheGroup, end_token: int, *, have_tokens: int, final_tokens: int
) -> bool:
    """Return True if the other side can use a block that it does not have.

    Args:
        group: Cache group of the block.
        end_token: Where the block ends, tokens from the start of the prompt.
        have_tokens: Usable prefix that the other side holds already.
        final_tokens: Length at which the other side will resume.
    """
    if not have_tokens < end_token <= final_tokens:
        return False
    match group.kind:
        case GroupKind.FULL_ATTENTION:
            return True
        case GroupKind.LINEAR_STATE:
            return end_token == final_tokens
        case GroupKind.SLIDING_WINDOW:
            return end_token > _window_start(group, final_tokens)


def shipped_bytes(layout: Layout, *, have_tokens: int, final_tokens: int) -> int:
    """Bytes of all blocks that are worth sending, each once, and of as many checkpoints as may go.

    Args:
        layout: Of the prompt's blocks.
        have_tokens: Usable prefix that the other side holds already.
        final_tokens: Length at which the other side will resume.
    """
    total, extra = 0, num_checkpoints(have_tokens, final_tokens, layout.checkpoint_tokens)
    for group in layout.groups:
        first, last = shipped_range(group, have_tokens, final_tokens)
        total += (last - first) * group.block_bytes
        if extra and group.kind is GroupKind.LINEAR_STATE:
            total += extra * group.block_bytes
    return total


def listed_range(layout: Layout, group: CacheGroup, have: int, final: int) -> tuple[int, int]:
    """Blocks that a transfer may ship: `shipped_range`, and every state that may be a checkpoint.

    Args:
        layout: Of the prompt's blocks.
        have: Usable prefix that the other side holds already, tokens.
        final: Length at which the other side will resume, tokens.
    """
    first, last = shipped_range(group, have, final)
    if layout.checkpoint_tokens and group.kind is GroupKind.LINEAR_STATE:
        first = min(first, -(-(have + layout.checkpoint_tokens) // group.tokens_per_block) - 1)
    return first, last


def shipped_range(group: CacheGroup, have_tokens: int, final_tokens: int) -> tuple[int, int]:
    """Blocks of a group that are worth sending, counted from the start of the prompt.

    Args:
        have_tokens: Usable prefix that the other side holds already.
        final_tokens: Length at which the other side will resume.

    Returns:
        How many come before the first of them, and up to the last.
    """
    first = have_tokens
    match group.kind:
        case GroupKind.LINEAR_STATE:
            first = max(first, final_tokens - 1)
        case GroupKind.SLIDING_WINDOW:
            first = max(first, _window_start(group, final_tokens))
    span = group.tokens_per_block
    before, last = max(0, first) // span, final_tokens // span
    return min(before, last), last


def _window_start(group: CacheGroup, final_tokens: int) -> int:
    """First token that the next one attends to, itself the last of its window; below 0 is all."""
    return final_tokens - max(group.window_tokens - 1, 1)
