"""How vLLM is plugged: its own offloading connector, with the pool node as its secondary tier.

    vllm serve MODEL --prefix-caching-hash-algo sha256_cbor --enable-prompt-tokens-details \\
        --middleware prfaas.engines.vllm_forget.ForgetRoute \\
        --kv-transfer-config '{"kv_connector": "PrfaasConnector",
            "kv_connector_module_path": "prfaas.engines.vllm_connector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 17179869184,
                "prfaas_engine": "NAME", "prfaas_pool": "/path/to/pool.sock"}}'

The connector adds nothing to vLLM's but the description of the cache groups, which only the
connector is given, and the choice of the tier.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from prfaas.config.engine_args import data_parallel_events_refused, pipeline_refused
from prfaas.engines.shared_memory import claim, remove_abandoned
from prfaas.engines.vllm_layout import describe
from prfaas.engines.vllm_tier import PrfaasTier
from prfaas.errors import ConfigError

log = logging.getLogger(__name__)


class PrfaasConnector(OffloadingConnector):
    """`OffloadingConnector` whose secondary tier is a prfaas pool node."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        tier = _choose_tier(vllm_config)
        # Before vLLM makes this engine's region: what killed ones left may be the room it needs.
        self._claim = claim(vllm_config.kv_transfer_config.engine_id)
        for region in remove_abandoned():
            log.warning("removed %s, which an engine that was killed had left", region)
        if role == KVConnectorRole.SCHEDULER:
            tier["row_layout"] = describe(vllm_config, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)

    def reset_cache(self) -> bool | None:
        """Drop all blocks in host memory, and what is remembered of where they came from."""
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


def _choose_tier(vllm_config: VllmConfig) -> dict[str, Any]:
    """Complete the connector's settings: which spec, which tier.

    Returns:
        The tier's settings, part of the configuration.

    Raises:
        ConfigError: A setting is missing.
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
        "engine": extra["prfaas_engine"],
        "pool": extra["prfaas_pool"],
    }
    extra["secondary_tiers"] = [tier]
    return tier


def _check_ranks(vllm_config: VllmConfig) -> None:
    """Refuse ranks whose blocks or events prfaas would get wrong.

    Raises:
        ConfigError: There are such.
    """
    parallel, events = vllm_config.parallel_config, vllm_config.kv_events_config
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError(pipeline_refused(parallel.pipeline_parallel_size))
    if parallel.data_parallel_size > 1 and events is not None and events.enable_kv_cache_events:
        raise ConfigError(data_parallel_events_refused(parallel.data_parallel_size))
