"""Intermediate checkpoints of linear state: their spacing, and which states of a prefill they are.

A prompt of a model with linear state resumes only where its state was kept. If a transfer ships the
last state alone, and breaks, decode computes the whole prompt. A checkpoint is an earlier state
that goes with its attention blocks: decode then resumes at the last whole one that arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import ceil, sqrt
from typing import Literal

from prfaas.core.kv.blocks import CacheGroup, GroupKind, Layout
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
    """Spacing of checkpoints in a deployment.

    Attributes:
        tokens: Least distance that the operator has set, tokens; 0 ships none; None is the rule.
        recompute_ns_per_token: Prefill time of a token in the cluster that decodes; 0 is unknown.
        link_bits_per_s: Rate of the slowest link; 0 is unknown.
    """

    tokens: int | None = 0
    recompute_ns_per_token: float = 0.0
    link_bits_per_s: float = 0.0

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
