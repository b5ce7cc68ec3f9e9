"""Ranks of an engine that the connector refuses: prfaas would get them wrong. Needs vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest

from prfaas.errors import ConfigError

from .vllm_modules import needing_vllm

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def connector() -> Any:
    needing_vllm("vllm.config")
    return needing_vllm("prfaas.engines.vllm_connector")


def config(events: bool = False, **sizes: Any) -> Any:
    """The part of vLLM's configuration that the connector reads, in vLLM's own tables."""
    vllm = needing_vllm("vllm.config")
    extra = {"prfaas_engine": "e", "prfaas_pool": "/run/p.sock", "cpu_bytes_to_use": 1 << 20}
    parallel = vllm.ParallelConfig()
    for name, size in sizes.items():
        assert hasattr(parallel, name)
        setattr(parallel, name, size)
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        parallel_config=parallel,
        kv_events_config=vllm.KVEventsConfig(enable_kv_cache_events=events),
    )


def test_pipeline_stages_are_refused_in_words(connector: Any) -> None:
    with pytest.raises(ConfigError, match=r"--pipeline-parallel-size 2: prfaas does not support"):
        connector._choose_tier(config(pipeline_parallel_size=2))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"nnodes": 2}, "--nnodes 2: the ranks of an engine have to be on one host"),
        ({"distributed_executor_backend": "ray"}, "--distributed-executor-backend ray: the ranks"),
        (
            {"distributed_executor_backend": "external_launcher"},
            "--distributed-executor-backend external_launcher: the ranks",
        ),
        ({"distributed_executor_backend": dict}, "--distributed-executor-backend dict: the ranks"),
        (
            {"data_parallel_size": 2, "data_parallel_backend": "ray"},
            "--data-parallel-backend ray: the ranks",
        ),
        ({"data_parallel_hybrid_lb": True}, "--data-parallel-hybrid-lb: the ranks"),
    ],
)
def test_ranks_on_several_hosts_are_refused_in_words(
    connector: Any, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        connector._choose_tier(config(**fields))


def test_events_of_several_ranks_are_refused_in_words(connector: Any) -> None:
    with pytest.raises(ConfigError, match=r"--data-parallel-size 2 with KV events: each rank"):
        connector._choose_tier(config(events=True, data_parallel_size=2))


def test_ranks_with_names_of_their_own_have_events_of_their_own(connector: Any) -> None:
    """`{rank}` makes each an engine of its own; vLLM resets the size in ranks of dense models."""
    for rank in range(2):
        given = config(events=True, data_parallel_size=2)
        given.kv_transfer_config.kv_connector_extra_config["prfaas_engine"] = "e-{rank}"
        given.parallel_config.data_parallel_index = rank
        assert connector._choose_tier(given)["engine"] == f"e-{rank}"
        given.parallel_config.reconfigure_for_independent_dp_rank()
        assert connector._choose_tier(given)["engine"] == f"e-{rank}"


def test_other_ranks_are_served(connector: Any) -> None:
    for given in (
        config(events=True),
        config(data_parallel_size=2),
        config(tensor_parallel_size=4),
        config(tensor_parallel_size=2, distributed_executor_backend="mp"),
        config(distributed_executor_backend="uni", decode_context_parallel_size=2),
    ):
        assert connector._choose_tier(given)["engine"] == "e"
