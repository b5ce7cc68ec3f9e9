"""Predictions of the TTFT of both paths.

Costs of compute and bytes, as tables by tokens.

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
from prfaas.core.kv.shipping import num_checkpoints
from prfaas.core.routing.decision import Path, RoutingFacts, Unpredicted
from prfaas.records import Record
from prfaas.units import BITS_PER_BYTE, NS_PER_S


class DecodeWait(Record, frozen=True):
    """Wait for decode; none unless a place falls free later."""

    free_after_ns: int = 0
    """Time from now until a place is free."""
    most_ns: int = 0

    def after(self, arrival_ns: int) -> int:
        """The wait of a request whose blocks are there after so many ns from now."""
        if not self.most_ns:
            return 0
        return min(max(0, self.free_after_ns - arrival_ns), self.most_ns)


NO_WAIT = DecodeWait()
"""Of a decode that takes every request at once."""


class CostModel:
    """Costs of compute and bytes, from profiles and the model's geometry. Pure."""

    __slots__ = ()

    def local_prefill_ns(self, num_new_tokens: int, prefix_tokens: int = 0) -> int:
        """Prefill time of one PD-P instance for new tokens after a cached prefix, ns."""
        raise NotImplementedError

    def remote_prefill_ns(self, num_new_tokens: int, prefix_tokens: int = 0) -> int:
        """Prefill time of one PrfaaS instance for new tokens after a cached prefix, ns."""
        raise NotImplementedError

    def shipped_bytes(self, num_prompt_tokens: int, present_tokens: int) -> int:
        """KV bytes of a prompt beyond a prefix that is there already."""
        raise NotImplementedError

    def tail_bytes(self, num_prompt_tokens: int, present_tokens: int) -> int:
        """Bytes among them that can leave only once prefill has ended."""
        raise NotImplementedError


class LinkState(Record, frozen=True):
    """Signals of a link that decisions are made from."""

    bits_per_s: float
    """Rate at which it carries what it is promised."""
    backlog_bytes: int = 0
    """Bytes promised and not sent yet."""
    rtt_ns: int = 0
    """Round trip; 0 is unknown."""
    utilisation: float = 0.0
    """Share of the time between the last two reports in which it was busy, in [0, 1]."""

    def drain_ns(self, num_bytes: int = 0) -> float:
        """Time in which it sends its backlog and `num_bytes` more; of a dead link, centuries."""
        bits = (self.backlog_bytes + num_bytes) * BITS_PER_BYTE
        return bits * NS_PER_S / max(self.bits_per_s, 1.0)


class PathSignals(Record, frozen=True):
    """Queues and link as the gateway knows them; None is unknown or too old to be trusted."""

    local_wait_ns: int | None = None
    """Wait for the PD-P instance that is free first."""
    remote_wait_ns: int | None = None
    """The same in the PrfaaS cluster."""
    link: LinkState | None = None
    """From the PrfaaS cluster."""
    num_transfers: int = 0
    """Transfers that were promised to the link and have not ended."""

    @property
    def link_lag_ns(self) -> float:
        """Time by which the link drains what it was promised later than prefill drains its queue.

        0 when that is unknown, and while the link keeps pace.
        """
        drain_ns = 0.0 if self.link is None else self.link.drain_ns()
        return max(0.0, drain_ns - (self.remote_wait_ns or 0))


class PathWork(Record, frozen=True, order=True):
    """Work of one request on either path."""

    num_new_tokens: int
    local_ns: int
    """Prefill on a local instance."""
    remote_ns: int | None
    """Prefill on a remote instance; None when it cannot go there."""
    shipped_bytes: int
    """What the remote path ships."""


class Prediction(Record, frozen=True):
    """Time from now to the first token on each path, ns; None is unknown."""

    local_ns: int | None
    remote_ns: int | None
    missing: Unpredicted | None = None
    """Reason why one is unknown."""
    computed_ns: int | None = None
    """Until the end of remote prefill, without link and decode."""
    pull_tokens: int = 0
    """Prefix that the PrfaaS cluster holds and that `local_ns` counts on fetching."""
    bytes_ns: int = 0
    """Worth of the bytes that the remote path ships, as time."""
    delay_ns: int = 0
    """Delay that these bytes cause to other transfers on the link, in all."""
    local_decode_ns: int = 0
    """Part of `local_ns` that is the wait for decode."""
    remote_decode_ns: int = 0
    """The same of `remote_ns`."""
    work: PathWork | None = None
    """Prefill and bytes of both paths; None without a cost model."""

    def decode_ns(self, path: Path) -> int:
        """Part of a path's time that is the wait for decode, ns."""
        return self.remote_decode_ns if path is Path.REMOTE else self.local_decode_ns


NO_PROFILE = Prediction(None, None, Unpredicted.NO_PROFILE)


def predict(
    facts: RoutingFacts,
    signals: PathSignals,
    costs: CostModel | None,
    decode_wait: DecodeWait = NO_WAIT,
    *,
    ns_per_byte: float = 0.0,
    delay_ns_per_byte: float = 0.0,
) -> Prediction:
    """Predict both paths; without a cost model neither.

    The remote path ships while it computes: it ends when the last bytes have left after prefill,
    or when the link has worked off its backlog and all bytes of this request, whichever is later.

    Args:
        costs: Compute and bytes; None is unknown.
        ns_per_byte: Worth of a shipped byte, as time.
        delay_ns_per_byte: Delay that a shipped byte causes to other transfers, in all.
    """
    if costs is None:
        return NO_PROFILE
    prompt, local_ns, computed_ns = facts.num_prompt_tokens, None, None
    here, there = facts.pd_hit_tokens, facts.prfaas_hit_tokens
    # As the properties of the facts have them: this is done for each option of each request.
    new, present = prompt - here, here - facts.device_only_tokens
    work_ns = costs.local_prefill_ns(new, here)
    remote_work_ns = costs.remote_prefill_ns(prompt - there, there)
    shipped = costs.shipped_bytes(prompt, present)
    local_decode_ns = remote_decode_ns = 0
    if signals.local_wait_ns is not None:
        local_ns = signals.local_wait_ns + work_ns
        local_decode_ns = decode_wait.after(local_ns)
        local_ns += local_decode_ns
    if signals.remote_wait_ns is not None:
        computed_ns = signals.remote_wait_ns + remote_work_ns
    remote_ns = _remote(prompt, present, signals, costs, computed_ns, shipped)
    if remote_ns is not None:
        remote_decode_ns = decode_wait.after(remote_ns)
        remote_ns += remote_decode_ns
    complete = local_ns is not None and remote_ns is not None
    missing = None if complete else Unpredicted.STALE_SIGNALS
    return Prediction(
        local_ns,
        remote_ns,
        missing,
        computed_ns,
        0,
        round(shipped * ns_per_byte),
        round(shipped * delay_ns_per_byte),
        local_decode_ns,
        remote_decode_ns,
        PathWork(new, work_ns, remote_work_ns, shipped),
    )


def _remote(
    prompt: int,
    present: int,
    signals: PathSignals,
    costs: CostModel,
    computed_ns: int | None,
    shipped: int,
) -> int | None:
    wait_ns, link = signals.remote_wait_ns, signals.link
    if wait_ns is None or computed_ns is None or link is None:
        return None
    ns_per_byte = (
        BITS_PER_BYTE * NS_PER_S / max(link.bits_per_s, 1.0)
    )  # a dead link: centuries, not unknown
    after_compute = computed_ns + costs.tail_bytes(prompt, present) * ns_per_byte
    backlog_ns = link.backlog_bytes * ns_per_byte
    link_free_ns = max(wait_ns, backlog_ns)
    after_link = link_free_ns + shipped * ns_per_byte
    # Transfers share the link: a long one is overtaken by those that come later.
    shared_ns = shipped * ns_per_byte * (1 + signals.num_transfers)
    if shared_ns > after_link and backlog_ns > wait_ns:
        after_link = (shared_ns + after_link) / 2
    return round(max(after_compute, after_link)) + link.rtt_ns


RESUME_SHIFT = 10
"""Bits of a prefix that tables of resumed prefills leave out: an entry each 1,024 tokens."""


@dataclass(frozen=True, slots=True)
class Costs(CostModel):
    """Tables that cost one index to read: a cost model, and the simulator's clockwork.

    Beyond its end a table continues as it ends."""

    local_ns: list[int]
    """Prefill time of a PD-P instance by the tokens of a cold prompt; at least 3."""
    remote_ns: list[int]
    """The same of a PrfaaS instance."""
    bytes_of: list[int]
    """KV bytes by prompt tokens."""
    state_bytes: int
    """Part of them that does not depend on the length."""
    chunk_tokens: int
    overlap: bool = True
    """Ship chunk by chunk while computing; else everything after prefill."""
    checkpoint_tokens: int = 0
    """Distance of the states that are shipped beside the last; 0 is none. Others than 0 are for
    `CheckpointCosts`."""
    local_resume_ns: Sequence[int] = ()
    """R of a PD-P instance by prefix, an entry each 2**`RESUME_SHIFT` tokens to the end of its
    other table; the last holds beyond. Empty: the time of no tokens."""
    remote_resume_ns: Sequence[int] = ()
    """The same of a PrfaaS instance."""

    def local_prefill_ns(self, num_new_tokens: int, prefix_tokens: int = 0) -> int:
        """Prefill time of a PD-P instance for new tokens after a cached prefix, ns."""
        table, index = self.local_ns, num_new_tokens if num_new_tokens > 0 else 1
        try:
            cold = table[index]
            if not prefix_tokens:
                return cold
            before, whole = table[prefix_tokens], table[prefix_tokens + index]
            found = whole - before + self.local_resume_ns[prefix_tokens >> RESUME_SHIFT]
        except IndexError:
            return _warm_beyond(table, self.local_resume_ns, index, prefix_tokens)
        return found if found > cold else cold

    def remote_prefill_ns(self, num_new_tokens: int, prefix_tokens: int = 0) -> int:
        """Prefill time of a PrfaaS instance for new tokens after a cached prefix, ns."""
        table, index = self.remote_ns, num_new_tokens if num_new_tokens > 0 else 1
        try:
            cold = table[index]
            if not prefix_tokens:
                return cold
            before, whole = table[prefix_tokens], table[prefix_tokens + index]
            found = whole - before + self.remote_resume_ns[prefix_tokens >> RESUME_SHIFT]
        except IndexError:
            return _warm_beyond(table, self.remote_resume_ns, index, prefix_tokens)
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
        ends = [*range(step, num_new_tokens, step), num_new_tokens]
        table = self.local_ns if is_local else self.remote_ns
        if not prefix_tokens and 0 < num_new_tokens < len(table):
            return [(end, table[end]) for end in ends]
        if is_local:
            return [(end, self.local_prefill_ns(end, prefix_tokens)) for end in ends]
        return [(end, self.remote_prefill_ns(end, prefix_tokens)) for end in ends]


@dataclass(frozen=True, slots=True)
class CheckpointCosts(Costs):
    """Costs of a model with linear state whose transfers ship checkpoints."""

    sent_of: list[int] = field(default_factory=list)
    """Bytes that a transfer ships by prompt tokens, checkpoints included."""

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


class ScaledBytes(CostModel):
    """Costs of a plan whose bytes are multiplied by a factor; times are the plan's.

    Args:
        factor: Above 0.
    """

    __slots__ = ("_costs", "_factor")

    def __init__(self, costs: CostModel, factor: float) -> None:
        self._costs, self._factor = costs, factor

    def local_prefill_ns(self, num_new_tokens: int, prefix_tokens: int = 0) -> int:
        """That of the plan."""
        return self._costs.local_prefill_ns(num_new_tokens, prefix_tokens)

    def remote_prefill_ns(self, num_new_tokens: int, prefix_tokens: int = 0) -> int:
        """That of the plan."""
        return self._costs.remote_prefill_ns(num_new_tokens, prefix_tokens)

    def shipped_bytes(self, num_prompt_tokens: int, present_tokens: int) -> int:
        """KV bytes beyond a prefix that is there already."""
        return round(self._costs.shipped_bytes(num_prompt_tokens, present_tokens) * self._factor)

    def tail_bytes(self, num_prompt_tokens: int, present_tokens: int) -> int:
        """Bytes of the last chunk, and the state."""
        return round(self._costs.tail_bytes(num_prompt_tokens, present_tokens) * self._factor)


def layout_of(costs: Costs, num_tokens: int, *, has_state: bool = True) -> Layout:
    """A layout of blocks that have the bytes of `costs` for a prompt of this length."""
    token_bytes = (costs.kv_bytes(num_tokens) - costs.state_bytes) // num_tokens
    attention = CacheGroup(0, GroupKind.FULL_ATTENTION, 1, token_bytes)
    state = CacheGroup(1, GroupKind.LINEAR_STATE, 1, costs.state_bytes)
    return Layout(bytes(LAYOUT_ID_BYTES), 1, "", (attention, state)[: 1 + has_state])


def _warm_beyond(table: list[int], resume: Sequence[int], new: int, prefix: int) -> int:
    """T(prefix, new) beyond the end of a table, or of a warm one without a table of R."""
    if not prefix:
        return _beyond(table, new)
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
