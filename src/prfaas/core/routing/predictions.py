"""Predictions of the TTFT of both paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from prfaas.core.routing.decision import Path, RoutingFacts, Unpredicted
from prfaas.records import Record
from prfaas.units import BITS_PER_BYTE, NS_PER_S

DecodeWait = Callable[[int], int]
"""Wait for decode, ns, of a request whose blocks are there after so many ns from now."""


class CostModel(Protocol):
    """Costs of compute and bytes, from profiles and the model's geometry. Pure."""

    def local_prefill_ns(self, num_new_tokens: int, prefix_tokens: int = 0) -> int:
        """Prefill time of one PD-P instance for new tokens after a cached prefix, ns."""

    def remote_prefill_ns(self, num_new_tokens: int, prefix_tokens: int = 0) -> int:
        """Prefill time of one PrfaaS instance for new tokens after a cached prefix, ns."""

    def shipped_bytes(self, num_prompt_tokens: int, present_tokens: int) -> int:
        """KV bytes of a prompt beyond a prefix that is there already."""

    def tail_bytes(self, num_prompt_tokens: int, present_tokens: int) -> int:
        """Bytes among them that can leave only once prefill has ended."""


class LinkState(Record, frozen=True):
    """Signals of a link that decisions are made from.

    Attributes:
        bits_per_s: Rate at which it carries what it is promised.
        backlog_bytes: Bytes promised and not sent yet.
        rtt_ns: Round trip; 0 is unknown.
        utilisation: Share of the time between the last two reports in which it was busy, in [0, 1].
    """

    bits_per_s: float
    backlog_bytes: int = 0
    rtt_ns: int = 0
    utilisation: float = 0.0

    def drain_ns(self, num_bytes: int = 0) -> float:
        """Time in which it sends its backlog and `num_bytes` more; of a dead link, centuries."""
        bits = (self.backlog_bytes + num_bytes) * BITS_PER_BYTE
        return bits * NS_PER_S / max(self.bits_per_s, 1.0)


class PathSignals(Record, frozen=True):
    """Queues and link as the gateway knows them; None is unknown or too old to be trusted.

    Attributes:
        local_wait_ns: Wait for the PD-P instance that is free first.
        remote_wait_ns: The same in the PrfaaS cluster.
        link: From the PrfaaS cluster.
        num_transfers: Transfers that were promised to the link and have not ended.
    """

    local_wait_ns: int | None = None
    remote_wait_ns: int | None = None
    link: LinkState | None = None
    num_transfers: int = 0

    @property
    def link_lag_ns(self) -> float:
        """Time by which the link drains what it was promised later than prefill drains its queue.

        0 when that is unknown, and while the link keeps pace.
        """
        drain_ns = 0.0 if self.link is None else self.link.drain_ns()
        return max(0.0, drain_ns - (self.remote_wait_ns or 0))


class PathWork(NamedTuple):
    """Work of one request on either path.

    Attributes:
        local_ns: Prefill on a local instance.
        remote_ns: Prefill on a remote instance; None when it cannot go there.
        shipped_bytes: What the remote path ships.
    """

    num_new_tokens: int
    local_ns: int
    remote_ns: int | None
    shipped_bytes: int


class Prediction(Record, frozen=True):
    """Time from now to the first token on each path, ns; None is unknown.

    Attributes:
        missing: Why one is unknown.
        computed_ns: Until the end of remote prefill, without link and decode.
        local_decode_ns: Part of `local_ns` that is the wait for decode.
        remote_decode_ns: The same of `remote_ns`.
        pull_tokens: Prefix that the PrfaaS cluster holds and that `local_ns` counts on fetching.
        bytes_ns: Worth of the bytes that the remote path ships, as time.
        delay_ns: Delay that these bytes cause to other transfers on the link, in all.
        work: Prefill and bytes of both paths; None without a cost model.
    """

    local_ns: int | None
    remote_ns: int | None
    missing: Unpredicted | None = None
    computed_ns: int | None = None
    pull_tokens: int = 0
    bytes_ns: int = 0
    delay_ns: int = 0
    local_decode_ns: int = 0
    remote_decode_ns: int = 0
    work: PathWork | None = None

    def decode_ns(self, path: Path) -> int:
        """Part of a path's time that is the wait for decode, ns."""
        return self.remote_decode_ns if path is Path.REMOTE else self.local_decode_ns


NO_PROFILE = Prediction(None, None, Unpredicted.NO_PROFILE)


def no_wait(_after_ns: int) -> int:
    """A decode that takes every request at once."""
    return 0


def predict(
    facts: RoutingFacts,
    signals: PathSignals,
    costs: CostModel | None,
    decode_wait: DecodeWait = no_wait,
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
        local_decode_ns = decode_wait(local_ns)
        local_ns += local_decode_ns
    if signals.remote_wait_ns is not None:
        computed_ns = signals.remote_wait_ns + remote_work_ns
    remote_ns = _remote(prompt, present, signals, costs, computed_ns, shipped)
    if remote_ns is not None:
        remote_decode_ns = decode_wait(remote_ns)
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
