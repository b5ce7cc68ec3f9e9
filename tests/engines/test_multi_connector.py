"""PrfaasConnector beside vLLM's NIXL connector; needs vLLM to import, not to run, and no NIXL."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prfaas.engines.orders import read_order
from prfaas.errors import ConfigError
from tests.engines.vllm_modules import needing_vllm

pytestmark = pytest.mark.timeout(300)
NIXL: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
PRFAAS: dict[str, Any] = {
    "kv_connector": "PrfaasConnector",
    "kv_connector_module_path": "prfaas.engines.vllm_connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 1 << 26,
        "prfaas_engine": "e",
        "prfaas_pool": "/run/p.sock",
    },
}


def multi(*connectors: dict[str, Any]) -> Any:
    """Configuration of an engine with several connectors, as vLLM reads it."""
    made = needing_vllm("vllm.config").KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        engine_id="engine",
        kv_connector_extra_config={"connectors": list(connectors)},
    )
    return SimpleNamespace(kv_transfer_config=made)


def test_vllm_takes_nixl_and_prfaas_together() -> None:
    """In the documented order, with one engine id, and with the hybrid cache manager on."""
    module = needing_vllm("vllm.distributed.kv_transfer.kv_connector.v1.multi_connector")
    given = multi(NIXL, PRFAAS)
    found = module.MultiConnector._get_connector_classes_and_configs(given)
    assert [kind.__name__ for kind, _ in found] == ["NixlPullConnector", "PrfaasConnector"]
    assert {config.kv_transfer_config.engine_id for _, config in found} == {"engine"}
    assert module.MultiConnector.all_children_support_hma(given.kv_transfer_config)
    extra = found[1][1].kv_transfer_config.kv_connector_extra_config
    assert extra["prfaas_engine"] == "e"


@pytest.mark.parametrize(
    "parameters", [{"do_remote_prefill": True, "remote_engine_id": "x"}, {"do_remote_decode": True}]
)
def test_what_nixl_is_told_is_no_order_of_ours(parameters: dict[str, Any]) -> None:
    order = {"transfer": "ab" * 16, "source": "pd-pool", "wait_ms": 10}
    assert read_order(parameters) is None
    assert read_order(parameters | {"prfaas": order}) == read_order({"prfaas": order}) != None  # noqa: E711


def test_two_of_ours_are_refused_in_words() -> None:
    connector = needing_vllm("prfaas.engines.vllm_connector")
    first = object.__new__(connector.PrfaasConnector)
    connector._alive["engine-of-test", "SCHEDULER"] = first
    connector._refuse_second("engine-of-test", "WORKER")
    connector._refuse_second("another", "SCHEDULER")
    with pytest.raises(ConfigError, match="list it once in MultiConnector"):
        connector._refuse_second("engine-of-test", "SCHEDULER")
    del first
    connector._refuse_second("engine-of-test", "SCHEDULER")


def test_nixl_decides_on_the_layout_which_prfaas_counts() -> None:
    """Both sites need it, or their layout ids differ and requests stay local."""
    nixl = needing_vllm("vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector")
    config = SimpleNamespace(model_config=SimpleNamespace(use_mla=False))
    assert nixl.NixlConnector.get_required_kvcache_layout(config) == "LBHNC"


def test_the_page_has_the_configuration_of_this_test() -> None:
    page = (Path(__file__).parents[2] / "docs" / "two-sites.md").read_text()
    section = page.partition("### NIXL and prfaas together")[2].partition("\n## ")[0]
    assert section.index("NixlConnector") < section.index("PrfaasConnector")
    assert "LBHNC" in section
