"""Blocks of a prompt that a transfer ships, and their bytes.

Intermediate checkpoints of linear state: their spacing, and which states of a prefill they are.

A prompt of a model with linear state resumes only where its state was kept. If a transfer ships the
last state alone, and breaks, decode computes the whole prompt. A checkpoint is an earlier state
that goes with its attention blocks: decode then resumes at the last whole one that arrived.

The list of blocks that a transfer may move, in the short form that travels beside its ticket.

A ticket carries the digest of the list, 32 bytes whatever the prompt. The list itself, 32 bytes a
block, goes with the push, the offer and the pull. Both pools compare the two, and refuse a block
that is not on the list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt
from typing import Literal

from prfaas.core.kv.blocks import HASH_BYTES, BlockKey, CacheGroup, GroupKind, Layout
from prfaas.core.kv.hashes import joined
from prfaas.units import BITS_PER_BYTE, NS_PER_S

TYPICAL_TOKENS = 32_768
TOKENS_BETWEEN_BREAKS = 100 * TYPICAL_TOKENS
"""Tokens shipped between two broken transfers: one transfer of 32K tokens in a hundred. Assumed,
and not measured: an operator who knows it sets the spacing."""
AUTO_SHARE = 0.1
"""Most that checkpoints of the rule add to a transfer, as a share of its other bytes."""
SET_SHARE = 1.0
"""The same of a spacing that an operator has set."""


def default_spacing(
    state_bytes: int,
    recompute_ns_per_token: float,
    link_bits_per_s: float,
    boundary_tokens: int,
    *,
    tokens_between_breaks: int = TOKENS_BETWEEN_BREAKS,
) -> int:
    """Tokens between two checkpoints, by the size of a state against the cost of recompute.

    A checkpoint costs the link the time of a state. A break costs the recompute of half a spacing,
    on average. The sum of both for each token is least at sqrt(2 C M), with C the cost of a
    checkpoint and M the distance of two breaks. Here both are tokens: C is the number of tokens
    that decode's cluster computes while the link sends a state.

    Args:
        state_bytes: State of all linear layers.
        recompute_ns_per_token: Prefill time of a token in the cluster that decodes; 0 is unknown.
        link_bits_per_s: Rate of the link; 0 is unknown.
        boundary_tokens: States are kept at multiples of this.

    Returns:
        A multiple of `boundary_tokens`; 0, which is no checkpoint, if the model has no state or a
        cost is unknown.

    References:
        J. W. Young, A first order approximation to the optimum checkpoint interval, Communications
        of the ACM 17(9), 1974, equation 7.
    """
    if not state_bytes or recompute_ns_per_token <= 0 or link_bits_per_s <= 0:
        return 0
    state_ns = state_bytes * BITS_PER_BYTE * NS_PER_S / link_bits_per_s
    checkpoint_tokens = state_ns / recompute_ns_per_token
    spacing = sqrt(2 * checkpoint_tokens * tokens_between_breaks)
    return max(1, ceil(spacing / boundary_tokens)) * boundary_tokens


@dataclass(frozen=True, slots=True)
class CheckpointRule:
    """Spacing of checkpoints in a deployment."""

    tokens: int | None = 0
    """Least distance that the operator has set, tokens; 0 ships none; None is the rule."""
    recompute_ns_per_token: float = 0.0
    """Prefill time of a token in the cluster that decodes; 0 is unknown."""
    link_bits_per_s: float = 0.0
    """Rate of the slowest link; 0 is unknown."""

    @classmethod
    def planned(
        cls,
        tokens: int | Literal["auto"],
        recompute_ns: Callable[[int], int] | None,
        links_bits_per_s: Iterable[float],
    ) -> CheckpointRule:
        """A rule that has the costs of a plan.

        Args:
            tokens: What the operator has set; "auto" is the rule.
            recompute_ns: Prefill time in the cluster that decodes by tokens; None without a plan.
        """
        each_ns = recompute_ns(TYPICAL_TOKENS) / TYPICAL_TOKENS if recompute_ns else 0.0
        return cls(
            None if tokens == "auto" else tokens, each_ns, min(links_bits_per_s, default=0.0)
        )

    def of(self, layout: Layout, *, have_tokens: int, final_tokens: int) -> Layout:
        """Return the layout with the spacing of one hand-off, in whole boundaries.

        It is no shorter than the bytes of the hand-off allow: the states that it admits are at
        most `AUTO_SHARE` or `SET_SHARE` of the attention and of the last state. Where that is less
        than one state, and without linear state, the layout stays.

        Args:
            layout: Of the prompt's blocks, without a spacing.
            have_tokens: Usable prefix that the other side holds already.
            final_tokens: Length at which the other side will resume.
        """
        state_bytes = _bytes_of(layout, GroupKind.LINEAR_STATE)
        new_tokens = final_tokens - have_tokens
        if not state_bytes or new_tokens <= 0 or self.tokens == 0:
            return layout
        boundary, spacing = layout.boundary_tokens, self.tokens
        if spacing is None:
            spacing = default_spacing(
                state_bytes, self.recompute_ns_per_token, self.link_bits_per_s, boundary
            )
        share = AUTO_SHARE if self.tokens is None else SET_SHARE
        attention_bytes = _bytes_of(layout, GroupKind.FULL_ATTENTION, new_tokens)
        num_max = int(share * (attention_bytes + state_bytes) / state_bytes)
        if not spacing or not num_max:
            return layout
        least = -(-new_tokens // (num_max + 1))
        return replace(layout, checkpoint_tokens=-(-max(spacing, least) // boundary) * boundary)


def _bytes_of(layout: Layout, kind: GroupKind, num_tokens: int = 0) -> int:
    """Bytes of the blocks of a kind: of so many tokens, or of one block a group."""
    return sum(
        group.block_bytes * (num_tokens // group.tokens_per_block if num_tokens else 1)
        for group in layout.groups
        if group.kind is kind
    )


def num_checkpoints(have_tokens: int, final_tokens: int, spacing: int) -> int:
    """Most checkpoints that a transfer ships before the state at `final_tokens`."""
    return max(0, final_tokens - have_tokens - 1) // spacing if spacing else 0


class Checkpoints:
    """States of one prefill that are shipped as checkpoints, chosen as they are stored.

    An engine keeps states where its steps end, at any boundary. The first one that is `spacing` or
    more after the last is shipped. Groups keep states at the same boundaries and are chosen alike.

    Args:
        spacing: Least distance, tokens; 0 chooses none.
        have_tokens: Usable prefix that the other side holds already.
        final_tokens: Length at which the other side will resume; its state is no checkpoint.
    """

    def __init__(self, spacing: int, *, have_tokens: int, final_tokens: int) -> None:
        self._spacing, self._have, self._final = spacing, have_tokens, final_tokens
        self._last: dict[int, int] = {}

    def takes(self, group: CacheGroup, end_token: int) -> bool:
        """Return True if a block is a checkpoint; it counts as shipped then.

        Args:
            group: Cache group of the block.
            end_token: Where it ends, tokens from the start of the prompt.
        """
        if not self._spacing or group.kind is not GroupKind.LINEAR_STATE:
            return False
        last = self._last.get(group.index, self._have)
        if not last + self._spacing <= end_token < self._final:
            return False
        self._last[group.index] = end_token
        return True


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


Manifest = Mapping[int, bytes]
"""By cache group, the hashes of its blocks, one behind the other in the order of the prompt."""
MANIFEST_BYTES_MAX = 4 << 20
"""131,072 blocks: two million tokens in blocks of 16."""
DIGEST_BYTES = 32


def manifest_of(
    layout: Layout, hashes: Sequence[bytes], *, have_tokens: int, final_tokens: int
) -> dict[int, bytes]:
    """List the blocks that are worth sending, and the states that may be checkpoints; ValueError if
    the chain lacks the hash of a block.

    Args:
        layout: Of the prompt's blocks.
        hashes: Hash chain of the prompt, one entry per `layout.tokens_per_hash` tokens, up to
            `final_tokens`. Entries at which no block ends are not read.
        have_tokens: Usable prefix that the other side holds already.
        final_tokens: Length at which the other side will resume.
    """
    manifest: dict[int, bytes] = {}
    for group in layout.groups:
        first, last = listed_range(layout, group, have_tokens, final_tokens)
        stride = group.tokens_per_block // layout.tokens_per_hash
        names = joined(hashes[(first + 1) * stride - 1 : last * stride : stride])
        if len(names) != (last - first) * HASH_BYTES:
            raise ValueError(
                f"cache group {group.index} has {last - first} blocks between {have_tokens} and "
                f"{final_tokens} tokens, and the chain names {len(names) // HASH_BYTES}"
            )
        if names:
            manifest[group.index] = names
    return manifest


def manifest_of_keys(keys: Iterable[BlockKey]) -> dict[int, bytes]:
    """List blocks by their keys, in the order of the prompt."""
    names: dict[int, list[bytes]] = {}
    for key in keys:
        names.setdefault(key.group, []).append(key.block_hash)
    return {group: b"".join(hashes) for group, hashes in names.items()}


def manifest_digest(manifest: Manifest) -> bytes:
    """BLAKE2b over groups and hashes, DIGEST_BYTES long; empty groups do not count."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"prfaas manifest")
    for group in sorted(manifest):
        names = manifest[group]
        if names:
            hasher.update(group.to_bytes(8, "big") + len(names).to_bytes(8, "big"))
            hasher.update(names)
    return hasher.digest()


class NamedBlocks:
    """The keys on a list, for as long as its transfer is open: about 130 bytes a block."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._hashes = {
            group: frozenset(names[at : at + HASH_BYTES] for at in range(0, len(names), HASH_BYTES))
            for group, names in manifest.items()
        }

    def __contains__(self, key: BlockKey) -> bool:
        return key.block_hash in self._hashes.get(key.group, frozenset())
