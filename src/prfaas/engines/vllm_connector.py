"""Integration with vLLM: its offloading connector, with the pool node as secondary tier.

    vllm serve MODEL --prefix-caching-hash-algo sha256_cbor --enable-prompt-tokens-details \\
        --middleware prfaas.engines.vllm_forget.ForgetRoute \\
        --kv-transfer-config '{"kv_connector": "PrfaasConnector",
            "kv_connector_module_path": "prfaas.engines.vllm_connector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 17179869184,
                "prfaas_engine": "NAME", "prfaas_pool": "/path/to/pool.sock"}}'

The connector adds to vLLM's the description of the cache groups, which only the connector is given,
the choice of the tier, and pauses in steps that can only wait for blocks (`empty_steps.py`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

from prfaas.engines import vllm_compat

vllm_compat.check_vllm()  # Before names are imported that another version may lack.

import msgspec
from vllm.config import ParallelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from prfaas.config.engine_args import (
    EXECUTORS,
    data_parallel_events_refused,
    hosts_refused,
    pipeline_refused,
)
from prfaas.core.kv.blocks import CacheGroup
from prfaas.engines.canonical.vllm_parts import KernelPages
from prfaas.engines.canonical.vllm_ranks import (
    RankReport,
    kernel_pages,
    memory_of,
    pages_of_ranks,
    set_chunk,
)
from prfaas.engines.empty_steps import EmptySteps
from prfaas.engines.shared_memory import (
    claim,
    leave_report,
    region_path,
    remove_abandoned,
    take_reports,
)
from prfaas.engines.vllm_layout import RowLayout, check_block_size, cut_at_blocks, describe
from prfaas.engines.vllm_tier import PrfaasTier
from prfaas.errors import ConfigError

log = logging.getLogger(__name__)

RANK = "{rank}"
"""In `prfaas_engine`: the data-parallel rank, so that each is an engine with a name of its own."""


_alive: WeakValueDictionary[tuple[str, str], PrfaasConnector] = WeakValueDictionary()
"""Connectors of this process, by engine id and role."""


class PrfaasConnector(OffloadingConnector):
    """`OffloadingConnector` with a prfaas pool node as secondary tier."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        vllm_compat.log_with_vllm()
        _refuse_second(vllm_config.kv_transfer_config.engine_id, role.name)
        tier = _choose_tier(vllm_config)
        # Before vLLM creates this engine's region, which may need the memory of killed engines.
        self._claim = claim(vllm_config.kv_transfer_config.engine_id)
        for region in remove_abandoned():
            log.warning("removed %s, left by a killed engine", region)
        if current_platform.is_cpu():
            from prfaas.engines.vllm_cpu import keep_seeds, sleep_when_idle

            sleep_when_idle()
            if role == KVConnectorRole.WORKER:
                keep_seeds()
        set_chunk(vllm_config, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            kernels = _pages_of_ranks(vllm_config)
            tier["row_layout"] = describe(vllm_config, kv_cache_config, kernels)
        super().__init__(vllm_config, role, kv_cache_config)
        _alive[vllm_config.kv_transfer_config.engine_id, role.name] = self
        # Ranks of data parallelism step together: a pause of one holds up the others.
        self._may_pause = vllm_config.parallel_config.data_parallel_size == 1
        if self.connector_scheduler is not None:
            vllm_compat.look_up_kept_windows(self.connector_scheduler)
            [our_tier] = self.connector_scheduler.manager.secondary_tiers
            self._tier: PrfaasTier = our_tier
            self._steps = EmptySteps(our_tier.must_wait, our_tier.wait_for_news)
            self._cache_config = vllm_config.cache_config
            described: RowLayout = tier["row_layout"]
            self._unchecked: tuple[CacheGroup, ...] = described.layout.groups
            self._combined = described.layout.groups if described.has_own_names else ()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take this rank's caches, and report to the scheduler where their blocks are copied to."""
        super().register_kv_caches(kv_caches)
        memory = memory_of(os.fstat(vllm_compat.worker_descriptor(self)))
        report = RankReport(memory, kernel_pages(self._kv_cache_config, kv_caches))
        engine_id, rank = vllm_compat.engine_and_rank(self)
        self._reported = leave_report(engine_id, rank, msgspec.json.encode(report))

    def on_new_request(self, request: Request) -> None:
        """A request came; blocks that an adapter computes stay in this engine.

        So do, where tokens give names, those of requests that have more than the tokens of now:
        images, embeddings, and inputs that are still to come. The tier gets the salt of each
        request: it names the tenant of the blocks.
        """
        if self._combined:
            # The engine's configuration may change until it runs.
            cut_at_blocks(self._cache_config, self._combined)
        has_more = request.mm_features or request.prompt_embeds is not None or request.resumable
        if request.lora_request is not None:
            self._tier.keep(request.request_id)
        elif self._combined and not has_more:
            self._tier.name(request.request_id, request.all_token_ids, request.cache_salt)
        self._tier.salted(request.request_id, request.cache_salt)
        super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens of a prompt that can be loaded; None while some may still come."""
        if self._steps.is_waiting(request.request_id, num_computed_tokens):
            return None, False
        found, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        decided = found is not None
        self._steps.looked_up(request.request_id, num_computed_tokens, decided=decided)
        return found, later

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the copies of the workers; an empty step ends with a pause."""
        if self._unchecked:
            # The engine's configuration may change until it runs.
            check_block_size(self._cache_config.block_size, self._unchecked)
            self._unchecked = ()
        meta = super().build_connector_meta(scheduler_output)
        ended = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        self._steps.scheduled(scheduler_output.num_scheduled_tokens, ended)
        copies = vllm_compat.open_jobs(self) or meta.jobs_to_flush
        if self._may_pause and not scheduler_output.total_num_scheduled_tokens and not copies:
            self._steps.pause()
        return meta

    def reset_cache(self) -> bool | None:
        """Drop all blocks in host memory, and their origins."""
        done: bool | None = super().reset_cache()
        for tier in self.scheduler.manager.secondary_tiers:
            if isinstance(tier, PrfaasTier):
                tier.forgotten()
        return done

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
        """Metrics of the tier; asked for in the API server, where no connector is made."""
        _choose_tier(vllm_config)
        return super().build_prom_metrics(vllm_config, *args, **kwargs)


def _pages_of_ranks(vllm_config: VllmConfig) -> dict[str, KernelPages]:
    """Return the order of the ranks' pages, by layer, once all ranks are seen to share memory;
    ConfigError if they do not."""
    engine_id = vllm_config.kv_transfer_config.engine_id
    num_ranks = vllm_config.parallel_config.world_size
    region = region_path(engine_id)
    try:
        # The scheduler opens it next.
        own = memory_of(region.stat())
    except FileNotFoundError:
        raise ConfigError(hosts_refused(f"no rank has made {region} here")) from None
    return pages_of_ranks(take_reports(engine_id, num_ranks), num_ranks, own)


def _choose_tier(vllm_config: VllmConfig) -> dict[str, Any]:
    """Complete the connector's settings: which spec, which tier; ConfigError if a setting is
    missing.

    Returns:
        The tier's settings, part of the configuration.
    """
    extra: dict[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
    for key in ("prfaas_engine", "prfaas_pool", "cpu_bytes_to_use"):
        if not extra.get(key):
            raise ConfigError(f"kv_connector_extra_config.{key} is required by PrfaasConnector")
    _check_ranks(vllm_config)
    if current_platform.is_cpu():
        extra["spec_name"] = "CpuPlatformSpec"
        extra["spec_module_path"] = "prfaas.engines.vllm_cpu"
    else:
        extra["spec_name"] = "TieringOffloadingSpec"
    tier: dict[str, Any] = {
        "type": "PrfaasTier",
        "module_path": "prfaas.engines.vllm_tier",
        "engine": _name_of_rank(vllm_config),
        "pool": extra["prfaas_pool"],
    }
    extra["secondary_tiers"] = [tier]
    return tier


def _refuse_second(engine_id: str, role: str) -> None:
    """Refuse two connectors of an engine, as a `MultiConnector` may list them; ConfigError if there
    is one."""
    if (engine_id, role) in _alive:
        raise ConfigError(
            f"engine {engine_id} has a PrfaasConnector already, and both would use the same host "
            "memory; list it once in MultiConnector"
        )


def _name_of_rank(vllm_config: VllmConfig) -> str:
    """The engine's name: `{rank}` in it is the data-parallel rank."""
    name: str = vllm_config.kv_transfer_config.kv_connector_extra_config["prfaas_engine"]
    return name.replace(RANK, str(vllm_config.parallel_config.data_parallel_index))


def _check_ranks(vllm_config: VllmConfig) -> None:
    """Refuse ranks whose blocks or events are not supported; ConfigError if there are such."""
    parallel, events = vllm_config.parallel_config, vllm_config.kv_events_config
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError(pipeline_refused(parallel.pipeline_parallel_size))
    for setting in _settings_of_hosts(parallel):
        raise ConfigError(hosts_refused(setting))
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    has_events = events is not None and events.enable_kv_cache_events
    if parallel.data_parallel_size > 1 and has_events and RANK not in extra["prfaas_engine"]:
        raise ConfigError(data_parallel_events_refused(parallel.data_parallel_size))


def _settings_of_hosts(parallel: ParallelConfig) -> Iterator[str]:
    """Settings by which ranks are on several hosts, or may be. Of all others, `vllm_ranks.py`
    compares the memory."""
    if parallel.nnodes > 1:
        yield f"--nnodes {parallel.nnodes}"
    executor = parallel.distributed_executor_backend
    if executor is not None and executor not in EXECUTORS:
        yield f"--distributed-executor-backend {getattr(executor, '__qualname__', executor)}"
    if parallel.data_parallel_size > 1 and parallel.data_parallel_backend == "ray":
        yield "--data-parallel-backend ray"
    if parallel.data_parallel_hybrid_lb:
        yield "--data-parallel-hybrid-lb"
