"""vLLM's secondary tier: the pool node.

Lives in vLLM's scheduler process. Translates between vLLM's offloading interface and
`BlockRequests`; decides which blocks of a pushed request are worth sending.

What a request may want of the pool node is in `orders.py`. Sent are the attention blocks between
`have_tokens`, what the other side has already, and `final_tokens`, and of linear state the one at
`final_tokens`, where the other side resumes. Earlier states go as checkpoints, for a transfer that
breaks, if the order asks for them.

Where shared blocks are longer than the engine's own, they have names of their own
(`canonical/block_names.py`), which the tier translates from and to vLLM's keys.

Blocks of an adapter (LoRA) stay in the engine. vLLM names them by the adapter's name and path
beside the tokens, which is enough for one process; in a pool node they would outlive it, and meet
those of other engines, whose adapter of that name and path may hold other bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from prfaas.core.kv.tenant_salts import tenant_tag
from prfaas.engines.block_requests import BlockRequests, BlockState, JobDone
from prfaas.engines.canonical.block_names import BlockNames
from prfaas.engines.lineage import Lineage
from prfaas.engines.orders import OrderedPush, PushOrder, read_order, wait_in
from prfaas.engines.pool_client import PoolConnection
from prfaas.engines.vllm_compat import key_positions, region_descriptor
from prfaas.engines.vllm_layout import RowLayout
from prfaas.wire.messages.base import Message
from prfaas.wire.messages.engine import REQUEST_CHARS_MAX, EngineHello, Load, PushDone, Store, Touch
from prfaas.wire.messages.fields import Key
from prfaas.wire.messages.layouts import layout_spec
from prfaas.wire.messages.survey import EngineShape

log = logging.getLogger(__name__)

_RESULTS = {
    BlockState.HIT: LookupResult.HIT,
    BlockState.MISS: LookupResult.MISS,
    BlockState.WAIT: LookupResult.RETRY,
}


@dataclass(frozen=True, slots=True)
class _Tenant:
    """Tenant of a request, in its context."""

    tag: str


class PrfaasTier(SecondaryTierManager):
    """The pool node as vLLM sees it."""

    medium = None
    # The tier answers to the scheduler's thread alone, also in the pauses of the connector.
    tolerates_off_thread_polling = False
    cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        engine: str,
        pool: str,
        row_layout: RowLayout,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._layout = row_layout.layout
        self._groups = {group.index: group for group in row_layout.layout.groups}
        self._pushes: dict[str, OrderedPush] = {}
        self._unannounced: dict[str, ReqContext] = {}
        """Requests with a push whose blocks vLLM has not named yet: it does when it schedules."""
        self._loads: dict[int, tuple[TransferJob, list[Key]]] = {}
        self._names: dict[str, BlockNames] | None = {} if row_layout.has_own_names else None
        """By request; None where the engine's own hashes are the names."""
        self._coming = "", ""
        """Request that is about to come, and the tag of its tenant."""
        self._kept: set[str] = set()
        """Requests whose blocks stay in the engine."""
        self._kept_stores: list[int] = []
        """Stores of theirs that are not reported as done yet."""
        self._lineage: Lineage[OffloadKey] = Lineage()
        self._requests = BlockRequests(self._send, time.monotonic_ns)
        hello = EngineHello(
            engine=engine,
            layout=layout_spec(row_layout.layout),
            row_bytes=self.block_size_bytes,
            num_rows=len(primary_kv_view),
            extents=row_layout.extents,
            facts=row_layout.facts,
            model=row_layout.model,
            runs={group: [*runs] for group, runs in row_layout.runs.items()},
            shape=EngineShape(ranks=row_layout.num_ranks, block_tokens=row_layout.tokens_per_hash),
        )
        self._client = PoolConnection(
            Path(pool),
            hello,
            region_descriptor(offloading_spec),
            self._requests.on_message,
            self._requests.on_lost,
        )

    def _send(self, message: Message) -> bool:
        return self._client.send(message)

    # --- requests ---

    def keep(self, request: str) -> None:
        """Have the blocks of a request stay in the engine. Called before `on_new_request`.

        Args:
            request: vLLM's id of it.
        """
        self._kept.add(request)

    def salted(self, request: str, cache_salt: str | None) -> None:
        """Set the cache salt of a request. Called before `on_new_request`.

        Args:
            request: vLLM's id of it.
        """
        self._coming = request, tenant_tag(cache_salt)

    def name(self, request: str, token_ids: Sequence[int], cache_salt: str | None) -> None:
        """Name the blocks of a request by its tokens. Called before `on_new_request`.

        Args:
            request: vLLM's id of it.
            token_ids: Prompt and answer, as vLLM extends them.
        """
        if self._names is not None:
            self._names[request] = BlockNames(self._layout, token_ids, cache_salt)

    def _key(self, key: OffloadKey, request: str, ends: Mapping[OffloadKey, int]) -> Key:
        """Name of a block for the pool node.

        Args:
            request: vLLM's id of it.
            ends: Last token of each of its blocks.
        """
        group = get_offload_group_idx(key)
        if self._names is None:
            return group, get_offload_block_hash(key)
        return group, self._names[request].at(ends[key])

    def _keys(self, keys: Iterable[OffloadKey], context: ReqContext) -> list[Key]:
        """Names of blocks of a request for the pool node."""
        ends = key_positions(context)
        return [self._key(key, context.req_id, ends) for key in keys]

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Read the instructions of the request."""
        request, tag = self._coming
        if request == req_context.req_id:
            req_context.set_state(_Tenant(tag))
        if self._names is not None and req_context.req_id not in self._names:
            # Its own hashes mean nothing outside this engine.
            self._kept.add(req_context.req_id)
        if req_context.req_id in self._kept:
            return RequestOffloadingContext()
        try:
            order = read_order(req_context.kv_transfer_params)
        except ValueError as error:
            log.warning("kv_transfer_params of %s ignored: %s", req_context.req_id, error)
            return RequestOffloadingContext()
        wait = wait_in(order)
        if wait is not None:
            self._requests.begin(req_context.req_id, wait.transfer_id, wait.source, wait.wait_ns)
        if isinstance(order, PushOrder):
            return self._begin_push(req_context, order)
        return RequestOffloadingContext()

    def _begin_push(self, context: ReqContext, order: PushOrder) -> RequestOffloadingContext:
        push = OrderedPush(order, self._layout)
        self._pushes[context.req_id] = push
        self._unannounced[context.req_id] = context
        # Blocks that this engine finds in its own cache have to be sent too.
        return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """All stores of the request were submitted."""
        self._kept.discard(req_context.req_id)
        lookups = self._requests.end(req_context.req_id)
        if lookups is not None and (lookups.num_late or lookups.num_unanswered):
            log.warning(
                "%s continues without blocks of its transfer: %d were found, %d missing, %d in "
                "transit, %d without answer",
                req_context.req_id,
                lookups.num_found,
                lookups.num_missing,
                lookups.num_late,
                lookups.num_unanswered,
            )
        push = self._pushes.pop(req_context.req_id, None)
        if push is not None:
            request, ends = req_context.req_id, key_positions(req_context)
            self._announce(push, request, ends)
            rest = push.rest((self._key(key, request, ends), end) for key, end in ends.items())
            self._client.send(PushDone(transfer_id=push.transfer_id, rest=rest))
        if self._names is not None:
            self._names.pop(req_context.req_id, None)

    def _announce(self, push: OrderedPush, request: str, ends: Mapping[OffloadKey, int]) -> None:
        """Announce a push to the pool node, once."""
        if self._unannounced.pop(request, None) is None:
            return
        span = self._layout.tokens_per_hash
        chain = {
            end_token // span: key
            for key, end_token in ends.items()
            if end_token <= push.final_tokens and end_token % span == 0
        }
        # As long as the prompt, not as the order: that could name any length.
        hashes = [b""] * max(chain, default=0)
        for number, key in chain.items():
            _, hashes[number - 1] = self._key(key, request, ends)
        self._client.send(push.announcement(hashes))

    # --- lookups ---

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT, MISS, or RETRY while not known or in transit."""
        if not self._client.is_connected or req_context.req_id in self._kept:
            return LookupResult.MISS
        name = self._key(key, req_context.req_id, key_positions(req_context))
        return _RESULTS[self._requests.look_up(req_context.req_id, name)]

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Blocks of a prefix hit in the device's own cache were used."""
        if keys and req_context.req_id not in self._kept:
            self._client.send(Touch(keys=self._keys(keys, req_context)))

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Send the lookups that this step collected, and announce pushes."""
        self._requests.flush()
        for request, own in list(self._unannounced.items()):
            ends = key_positions(own)
            if ends:
                self._announce(self._pushes[request], request, ends)

    def must_wait(self, request: str) -> bool:
        """Return True while all lookups of a request would be answered as before, with RETRY."""
        return self._requests.must_wait(request)

    def wait_for_news(self, limit_s: float) -> None:
        """Wait for a message of the pool node, if any is expected."""
        self._requests.wait_for_news(limit_s)

    # --- jobs ---

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Hand rows over to the pool node, and have them pushed if the request wants it."""
        if job_metadata.req_context.req_id in self._kept:
            self._kept_stores.append(job_metadata.job_id)
            return
        request, ends = job_metadata.req_context.req_id, key_positions(job_metadata.req_context)
        keys = [self._key(key, request, ends) for key in job_metadata.keys]
        push = self._pushes.get(request)
        wanted: set[Key] = set()
        if push:
            self._announce(push, request, ends)
            stored = (ends.get(key, 0) for key in job_metadata.keys)
            wanted = push.take(zip(keys, stored, strict=True))
        tenant = job_metadata.req_context.get_state(_Tenant)
        self._requests.submit(
            Store(
                job=job_metadata.job_id,
                keys=keys,
                rows=[int(row) for row in job_metadata.chunk_ids],
                transfer_id=push.transfer_id if push else None,
                pushed=[key in wanted for key in keys],
                sources=self._lineage.sources(ends.keys()),
                tenant=tenant.tag if tenant is not None else "",
            )
        )
        if push and push.is_complete:
            # The request may go on for long: the other side need not wait for its end.
            del self._pushes[request]
            self._client.send(PushDone(transfer_id=push.transfer_id))

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Have the pool node fill rows."""
        keys = self._keys(job_metadata.keys, job_metadata.req_context)
        self._requests.submit(
            Load(
                job=job_metadata.job_id,
                keys=keys,
                rows=[int(row) for row in job_metadata.chunk_ids],
                request=job_metadata.req_context.req_id[:REQUEST_CHARS_MAX],
            )
        )
        self._loads[job_metadata.job_id] = job_metadata, keys

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that ended, with the keys of a load that are good."""
        kept, self._kept_stores = self._kept_stores, []
        results = [JobResult(job, True) for job in kept]
        return results + [self._result(done) for done in self._requests.take_done()]

    def _result(self, done: JobDone) -> JobResult:
        load, names = self._loads.pop(done.job, (None, []))
        if load is None:
            return JobResult(done.job, done.ok)
        self._lineage.loaded(self._first(load), done.sources)
        if done.ok:
            return JobResult(done.job, True)
        good = [key for key, fine in zip(load.keys, done.loaded, strict=True) if fine]
        bad = [name for name, fine in zip(names, done.loaded, strict=True) if not fine]
        self._requests.forget(load.req_context.req_id, bad)
        return JobResult(done.job, False, successful_keys=tuple(good) or None)

    def _first(self, load: TransferJob) -> list[OffloadKey]:
        """The first loaded block of the prompt.

        None where all of them end within a block: other prompts do not name such tails.
        """
        positions = key_positions(load.req_context)
        whole = [
            (end_token, key)
            for key in load.keys
            if (end_token := positions.get(key))
            and end_token % self._groups[get_offload_group_idx(key)].tokens_per_block == 0
        ]
        return [min(whole)[1]] if whole else []

    def forgotten(self) -> None:
        """The engine has dropped all blocks that it held; nothing of them is under way."""
        self._lineage.forget()

    def has_pending_work(self) -> bool:
        """Keep the engine stepping until every job is reported."""
        return self._requests.num_jobs > 0 or bool(self._kept_stores)

    def drain_jobs(self) -> None:
        """Wait until no job is under way."""
        while self._requests.num_jobs:
            time.sleep(0.001)

    def shutdown(self) -> None:
        """Leave the pool node."""
        self._client.close()
