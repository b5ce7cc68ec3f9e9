"""Names of the blocks that a usable prefix needs."""

from __future__ import annotations

from collections.abc import Sequence

from prfaas.core.kv.blocks import BlockKey, GroupKind, Layout, block_key


class PrefixNames:
    """Names of the blocks of prompts.

    Args:
        layout: Of the blocks.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout, self._span = layout, layout.boundary_tokens
        self._growing = [g for g in layout.groups if g.kind is not GroupKind.LINEAR_STATE]
        self._fixed = [g for g in layout.groups if g.kind is GroupKind.LINEAR_STATE]

    @property
    def has_state(self) -> bool:
        """Return True if a prefix is usable only where linear state was kept."""
        return bool(self._fixed)

    def needed(self, hashes: list[bytes], held_tokens: int, end_token: int) -> list[BlockKey]:
        """Blocks that make a prefix of `end_token` usable, beyond the attention that is held.

        Attention comes first, block by block; state comes last.
        """
        return [
            block_key(self._layout, group, hashes, end)
            for end in range(held_tokens + self._span, end_token + 1, self._span)
            for group in self._growing
        ] + self.states(hashes, end_token)

    def states(self, hashes: list[bytes], end_token: int) -> list[BlockKey]:
        """The linear state at a boundary."""
        if not end_token:
            return []
        return [block_key(self._layout, group, hashes, end_token) for group in self._fixed]

    def boundaries(self, num_tokens: int) -> list[int]:
        """All boundaries of a prefix."""
        return list(range(self._span, num_tokens + 1, self._span))

    def leading_tokens(self, hits: Sequence[bool]) -> int:
        """Tokens from the start of what is `needed` whose attention is all there."""
        width, count = len(self._growing), 0
        flags = hits[: len(hits) - len(self._fixed)]
        while (count + 1) * width <= len(flags) and all(flags[count * width :][:width]):
            count += 1
        return count * self._span

    def last_with_state(self, ends: Sequence[int], hits: Sequence[bool]) -> int:
        """The last of some boundaries whose `states` are all there; 0 for none."""
        width = len(self._fixed)
        whole = (end for i, end in enumerate(ends) if all(hits[i * width :][:width]))
        return max(whole, default=0)
