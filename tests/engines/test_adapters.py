"""Blocks of adapters never reach a pool node; needs vLLM to import, not to run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from prfaas.core.kv.blocks import CacheGroup, GroupKind, Layout
from prfaas.core.kv.naming.hash_chain import hash_chain
from prfaas.core.kv.tenant_salts import tenant_tag
from prfaas.engines.block_requests import BlockRequests
from tests.engines.vllm_modules import needing_vllm

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def tier() -> Any:
    """A tier whose messages to the pool node are noted."""
    made = object.__new__(needing_vllm("prfaas.engines.vllm_tier").PrfaasTier)
    made.sent = []

    def send(message: Any) -> bool:
        made.sent.append(message)
        return True

    made._client = SimpleNamespace(send=send, is_connected=True)
    made._requests = BlockRequests(send, lambda: 0)
    made._pushes, made._unannounced, made._loads = {}, {}, {}
    made._kept, made._kept_stores, made._names = set(), [], None
    made._coming = ("", "")
    made._lineage = SimpleNamespace(sources=lambda _: [])
    return made


@pytest.fixture
def connector(tier: Any) -> Any:
    made = object.__new__(needing_vllm("prfaas.engines.vllm_connector").PrfaasConnector)
    base = needing_vllm("vllm.v1.kv_offload.base")
    made._tier, made._combined = tier, ()
    made.connector_scheduler = SimpleNamespace(
        on_new_request=lambda request: tier.on_new_request(base.ReqContext(request.request_id))
    )
    return made


def use(tier: Any, context: Any, key: bytes) -> Any:
    """Everything that vLLM asks of a tier for a request that computes one block."""
    base = needing_vllm("vllm.v1.kv_offload.base")
    found = tier.lookup(key, context)
    tier.touch([key], context)
    tier.on_schedule_end(base.ScheduleEndContext([context.req_id], []))
    tier.submit_store(SimpleNamespace(job_id=7, keys=[key], chunk_ids=[0], req_context=context))
    return found


@pytest.mark.parametrize("adapter", [None, SimpleNamespace(lora_name="a", lora_path="/a")])
def test_only_the_models_own_blocks_reach_the_pool_node(
    connector: Any, tier: Any, adapter: Any
) -> None:
    base = needing_vllm("vllm.v1.kv_offload.base")
    request = SimpleNamespace(
        request_id="r",
        lora_request=adapter,
        cache_salt="salt",
        mm_features=[],
        prompt_embeds=None,
        resumable=False,
    )
    connector.on_new_request(request)
    context, key = base.ReqContext("r"), base.make_offload_key(bytes(32), 0)
    found = use(tier, context, key)
    assert tier.has_pending_work()
    if adapter is None:
        assert found is base.LookupResult.RETRY
        assert {type(each).__name__ for each in tier.sent} == {"Touch", "Lookup", "Store"}
        assert tier.get_finished_jobs() == []
        return
    assert found is base.LookupResult.MISS
    assert tier.sent == []
    [done] = tier.get_finished_jobs()
    assert (done.job_id, done.success) == (7, True)
    assert not tier.has_pending_work()
    tier.on_request_finished(context)
    assert tier._kept == set()


MORE = {
    "an image": {"mm_features": ["image"]},
    "embeddings": {"prompt_embeds": object()},
    "a session whose input goes on": {"resumable": True},
    "tokens alone": {},
}


@pytest.mark.parametrize("more", MORE.values(), ids=MORE)
def test_combined_blocks_reach_the_pool_node_only_if_tokens_name_them(
    connector: Any, tier: Any, more: dict[str, Any]
) -> None:
    base = needing_vllm("vllm.v1.kv_offload.base")
    groups = (CacheGroup(0, GroupKind.FULL_ATTENTION, 32, 8),)
    tier._names, tier._layout = {}, Layout(b"L" * 32, 32, "7", groups)
    connector._combined, connector._cache_config = groups, SimpleNamespace(block_size=16)
    given: dict[str, Any] = {"mm_features": [], "prompt_embeds": None, "resumable": False}
    tokens: dict[str, Any] = {"all_token_ids": list(range(40)), "cache_salt": None}
    connector.on_new_request(
        SimpleNamespace(request_id="r", lora_request=None, **(tokens | given | more))
    )
    context, key = base.ReqContext("r"), base.make_offload_key(bytes(32), 0)
    context.set_offload_key_position(key, 32)
    found = use(tier, context, key)
    if more:
        assert (found, tier.sent) == (base.LookupResult.MISS, [])
    else:
        [name] = hash_chain(list(range(40)), tokens_per_hash=32, seed="7", cache_salt=None)
        assert found is base.LookupResult.RETRY
        assert [each.keys for each in tier.sent] == [[(0, name)]] * 3
    tier.on_request_finished(context)
    assert (tier._kept, tier._names) == (set(), {})


def test_a_request_that_was_never_named_stays_in_its_engine(tier: Any) -> None:
    """vLLM announces a request that it has not tracked when that ends."""
    base = needing_vllm("vllm.v1.kv_offload.base")
    tier._names, tier._layout = {}, None
    context, key = base.ReqContext("r"), base.make_offload_key(bytes(32), 0)
    tier.on_new_request(context)
    assert use(tier, context, key) is base.LookupResult.MISS
    assert tier.sent == []


def test_a_store_names_the_tenant_of_its_request_and_no_other(connector: Any, tier: Any) -> None:
    base = needing_vllm("vllm.v1.kv_offload.base")
    contexts = {name: base.ReqContext(name) for name in ("r", "s", "t")}
    for name, salt in (("r", "salt.of-a-user"), ("s", None), ("t", "other")):
        connector._tier.salted(name, salt)
        tier.on_new_request(contexts[name])
    for context in contexts.values():
        use(tier, context, base.make_offload_key(bytes(32), 0))
    stores = [each for each in tier.sent if type(each).__name__ == "Store"]
    assert [each.tenant for each in stores] == [tenant_tag("salt"), "", tenant_tag("other")]


def test_a_push_is_not_begun_for_an_adapter(connector: Any, tier: Any) -> None:
    """A direct request to an engine gets no transfer."""
    base = needing_vllm("vllm.v1.kv_offload.base")
    order = {"transfer": "00" * 16, "push_to": "pd-pool", "final_tokens": 384}
    context = base.ReqContext("r", {"prfaas": order})
    tier.keep("r")
    asked = tier.on_new_request(context)
    assert asked.policy is base.OffloadPolicy.CHUNK_LEVEL
    assert tier._pushes == {}


def test_vllm_names_blocks_by_adapter() -> None:
    """Block names separate the caches of adapters within an engine, in the pinned vLLM."""
    utils = needing_vllm("vllm.v1.core.kv_cache_utils")

    def keys(adapter: Any) -> Any:
        request = SimpleNamespace(
            lora_request=adapter, mm_features=[], cache_salt="s", prompt_embeds=None
        )
        return utils.generate_block_hash_extra_keys(request, 16, 32, 0)[0]

    one = SimpleNamespace(lora_name="one", lora_path="/1")
    moved = SimpleNamespace(lora_name="one", lora_path="/2")
    two = SimpleNamespace(lora_name="two", lora_path="/1")
    assert len({keys(adapter) for adapter in (None, one, moved, two)}) == 4
