"""Costs of compute and bytes, as tables by tokens.

    T(prefix, new) = max(T(new), T(prefix + new) - T(prefix) + R(prefix))

T is the time of a cold prompt: its slope at a length has the attention of a token over all before
it, so the difference is what the new tokens cost after the prefix. R is what a prefill takes
beside its tokens: the fixed time of a cold one, and more where a prefix was measured to cost more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from prfaas.core.kv.blocks import LAYOUT_ID_BYTES, CacheGroup, GroupKind, Layout
from prfaas.core.kv.checkpoints import num_checkpoints
from prfaas.core.routing.predictions import CostModel

RESUME_SHIFT = 10
"""Bits of a prefix that tables of resumed prefills leave out: an entry each 1,024 tokens."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Tables that cost one index to read; a `CostModel`, and the simulator's clockwork.

    Beyond its end a table continues as it ends.

    Attributes:
        local_ns: Prefill time of a PD-P instance by the tokens of a cold prompt; at least 3.
        remote_ns: The same of a PrfaaS instance.
        bytes_of: KV bytes by prompt tokens.
        state_bytes: Part of them that does not depend on the length.
        overlap: Ship chunk by chunk while computing; else everything after prefill.
        checkpoint_tokens: Distance of the states that are shipped beside the last; 0 is none.
            Others than 0 are for `CheckpointCosts`.
        local_resume_ns: R of a PD-P instance by prefix, an entry each 2**`RESUME_SHIFT` tokens to
            the end of its other table; the last holds beyond. Empty: the time of no tokens.
        remote_resume_ns: The same of a PrfaaS instance.
    """

    local_ns: list[int]
    remote_ns: list[int]
    bytes_of: list[int]
    state_bytes: int
    chunk_tokens: int
    overlap: bool = True
    checkpoint_tokens: int = 0
    local_resume_ns: Sequence[int] = ()
    remote_resume_ns: Sequence[int] = ()

    def local_prefill_ns(self, num_new_tokens: int, prefix_tokens: int = 0) -> int:
        """Prefill time of a PD-P instance for new tokens after a cached prefix, ns."""
        table, index = self.local_ns, num_new_tokens if num_new_tokens > 0 else 1
        if not prefix_tokens:
            return table[index] if index < len(table) else _beyond(table, index)
        resume, end = self.local_resume_ns, prefix_tokens + index
        if not resume or end >= len(table):
            return _warm_beyond(table, resume, index, prefix_tokens)
        found = table[end] - table[prefix_tokens] + resume[prefix_tokens >> RESUME_SHIFT]
        cold = table[index]
        return found if found > cold else cold

    def remote_prefill_ns(self, num_new_tokens: int, prefix_tokens: int = 0) -> int:
        """Prefill time of a PrfaaS instance for new tokens after a cached prefix, ns."""
        table, index = self.remote_ns, num_new_tokens if num_new_tokens > 0 else 1
        if not prefix_tokens:
            return table[index] if index < len(table) else _beyond(table, index)
        resume, end = self.remote_resume_ns, prefix_tokens + index
        if not resume or end >= len(table):
            return _warm_beyond(table, resume, index, prefix_tokens)
        found = table[end] - table[prefix_tokens] + resume[prefix_tokens >> RESUME_SHIFT]
        cold = table[index]
        return found if found > cold else cold

    def shipped_bytes(self, num_prompt_tokens: int, present_tokens: int) -> int:
        """KV bytes beyond a prefix that is there already; the state is shipped whole."""
        table, end, start = self.bytes_of, num_prompt_tokens, present_tokens
        whole = table[end] if end < len(table) else _beyond(table, end)
        if not start:
            return whole
        present = table[start] if start < len(table) else _beyond(table, start)
        return whole - present + self.state_bytes

    def kv_bytes(self, num_tokens: int) -> int:
        """KV bytes of a sequence."""
        table = self.bytes_of
        return table[num_tokens] if num_tokens < len(table) else _beyond(table, num_tokens)

    def sent_bytes(self, num_tokens: int) -> int:
        """Bytes that the tokens of a prompt add to a transfer, and its last state."""
        table = self.bytes_of
        return table[num_tokens] if num_tokens < len(table) else _beyond(table, num_tokens)

    def tokens_in(self, present_tokens: int, num_bytes: float) -> int:
        """Usable tokens that are there once `num_bytes` of a transfer have followed a prefix.

        With linear state there are none before the last state, which comes at the end.
        """
        if self.state_bytes:
            return 0
        whole = self.kv_bytes(present_tokens) + num_bytes
        return max(bisect_right(self.bytes_of, whole) - 1, present_tokens)

    def tail_bytes(self, num_prompt_tokens: int, present_tokens: int) -> int:
        """Bytes of the last chunk, and the state."""
        if not self.overlap:
            return self.shipped_bytes(num_prompt_tokens, present_tokens)
        last = (num_prompt_tokens - present_tokens - 1) % self.chunk_tokens + 1
        return self.shipped_bytes(num_prompt_tokens, num_prompt_tokens - last)

    def chunks(
        self, num_new_tokens: int, prefix_tokens: int = 0, *, is_local: bool = False
    ) -> list[tuple[int, int]]:
        """End of every chunk of a prefill after a cached prefix, remote unless it is local: tokens
        computed, and ns since its start."""
        step = self.chunk_tokens if self.overlap else num_new_tokens
        prefill_ns = self.local_prefill_ns if is_local else self.remote_prefill_ns
        ends = range(step, num_new_tokens, step)
        if prefix_tokens:
            found = [(end, prefill_ns(end, prefix_tokens)) for end in ends]
        else:
            table = self.local_ns if is_local else self.remote_ns
            size = len(table)
            found = [(end, table[end] if end < size else _beyond(table, end)) for end in ends]
        found.append((num_new_tokens, prefill_ns(num_new_tokens, prefix_tokens)))
        return found


@dataclass(frozen=True, slots=True)
class CheckpointCosts(Costs):
    """Costs of a model with linear state whose transfers ship checkpoints.

    Attributes:
        sent_of: Bytes that a transfer ships by prompt tokens, checkpoints included.
    """

    sent_of: list[int] = field(default_factory=list)

    def shipped_bytes(self, num_prompt_tokens: int, present_tokens: int) -> int:
        """KV bytes beyond a prefix that is there already, the last state, and checkpoints."""
        whole = self.sent_bytes(num_prompt_tokens)
        if not present_tokens:
            return whole
        return whole - self.sent_bytes(present_tokens) + self.state_bytes

    def sent_bytes(self, num_tokens: int) -> int:
        """Bytes that the tokens of a prompt add to a transfer, and its last state."""
        if num_tokens < len(self.sent_of):
            return self.sent_of[num_tokens]
        return _with_states(self, num_tokens, self.kv_bytes(num_tokens), self.checkpoint_tokens)

    def tokens_in(self, present_tokens: int, num_bytes: float) -> int:
        """The last checkpoint that has arrived whole with its attention, or what was there."""
        whole = self.sent_bytes(present_tokens) + num_bytes
        found = max(bisect_right(self.sent_of, whole) - 2, 0)
        return max(found // self.checkpoint_tokens * self.checkpoint_tokens, present_tokens)


def with_checkpoints(costs: Costs, spacing: int) -> Costs:
    """Costs whose transfers ship a checkpoint every `spacing` tokens.

    A model without state, and a spacing of 0, keep their costs as they are.
    """
    if not spacing or not costs.state_bytes:
        return costs
    sent = [
        _with_states(costs, tokens, size, spacing) for tokens, size in enumerate(costs.bytes_of)
    ]
    known = {f.name: getattr(costs, f.name) for f in fields(Costs)}
    return CheckpointCosts(**{**known, "checkpoint_tokens": spacing}, sent_of=sent)


def _with_states(costs: Costs, num_tokens: int, num_bytes: int, spacing: int) -> int:
    return num_bytes + costs.state_bytes * num_checkpoints(0, num_tokens, spacing)


class ScaledBytes:
    """Costs of a plan whose bytes are multiplied by a factor; times are the plan's.

    Args:
        factor: Above 0.
    """

    __slots__ = ("_factor", "_shipped", "_tail", "local_prefill_ns", "remote_prefill_ns")

    def __init__(self, costs: CostModel, factor: float) -> None:
        self.local_prefill_ns = costs.local_prefill_ns
        self.remote_prefill_ns = costs.remote_prefill_ns
        self._shipped, self._tail, self._factor = costs.shipped_bytes, costs.tail_bytes, factor

    def shipped_bytes(self, num_prompt_tokens: int, present_tokens: int) -> int:
        """KV bytes beyond a prefix that is there already."""
        return round(self._shipped(num_prompt_tokens, present_tokens) * self._factor)

    def tail_bytes(self, num_prompt_tokens: int, present_tokens: int) -> int:
        """Bytes of the last chunk, and the state."""
        return round(self._tail(num_prompt_tokens, present_tokens) * self._factor)


def layout_of(costs: Costs, num_tokens: int, *, has_state: bool = True) -> Layout:
    """A layout of blocks that have the bytes of `costs` for a prompt of this length."""
    token_bytes = (costs.kv_bytes(num_tokens) - costs.state_bytes) // num_tokens
    attention = CacheGroup(0, GroupKind.FULL_ATTENTION, 1, token_bytes)
    state = CacheGroup(1, GroupKind.LINEAR_STATE, 1, costs.state_bytes)
    return Layout(bytes(LAYOUT_ID_BYTES), 1, "", (attention, state)[: 1 + has_state])


def _warm_beyond(table: list[int], resume: Sequence[int], new: int, prefix: int) -> int:
    """T(prefix, new) beyond the end of a table, or without a table of R."""
    size, place = len(table), prefix >> RESUME_SHIFT
    cold, before, whole = (
        table[tokens] if tokens < size else _beyond(table, tokens)
        for tokens in (new, prefix, prefix + new)
    )
    if resume:
        fixed = resume[place] if place < len(resume) else resume[-1]
    else:
        fixed = max(2 * table[1] - table[2], 0)
    return max(cold, whole - before + fixed)


def _beyond(table: list[int], index: int) -> int:
    """A table continues as it ends."""
    return table[-1] + (index - len(table) + 1) * (table[-1] - table[-2])
