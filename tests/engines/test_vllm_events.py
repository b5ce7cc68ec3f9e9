"""vLLM's own publisher of KV events, followed by a gateway's index; needs vLLM to import."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.kv.blocks import CacheGroup, GroupKind, Layout
from prfaas.core.kv.naming.hash_chain import hash_chain
from prfaas.core.kv.prefix_index import PrefixIndex, SourceState
from prfaas.gateway.engines.kv_event_subscriber import (
    EngineEvents,
    EventTiming,
    SubscriptionObserver,
)
from tests.gateway.conftest import until
from tests.gateway.kv_publisher import followed_deployment

from .vllm_modules import needing_vllm

pytestmark = pytest.mark.timeout(180)
LAYOUT = Layout(b"L" * 32, 16, "0", (CacheGroup(0, GroupKind.FULL_ATTENTION, 16, 1024),))
CHAIN = hash_chain(list(range(160)), tokens_per_hash=16, seed="0", cache_salt="s")
EXACT = SourceState.EXACT


@pytest.fixture(scope="module")
def kv_events() -> Any:
    return needing_vllm("vllm.distributed.kv_events")


@pytest.fixture
def publisher(kv_events: Any, tmp_path: Path) -> Iterator[Any]:
    made = kv_events.ZmqEventPublisher(
        0, endpoint=f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replay"
    )
    yield made
    made.shutdown()


@pytest.mark.parametrize("as_bytes", [True, False])
async def test_an_index_follows_vllms_publisher(
    kv_events: Any,
    publisher: Any,
    tmp_path: Path,
    as_bytes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0" if as_bytes else "1")
    convert = needing_vllm("vllm.v1.core.kv_cache_utils").maybe_convert_block_hash
    names = [convert(name) for name in CHAIN]
    assert isinstance(names[0], bytes) is as_bytes

    def publish(*events: Any) -> None:
        publisher.publish(kv_events.KVEventBatch(ts=1.0, events=list(events)))

    def stored(hashes: list[Any], medium: str = "GPU") -> Any:
        return kv_events.BlockStored(
            block_hashes=hashes,
            parent_block_hash=None,
            token_ids=list(range(16 * len(hashes))),
            block_size=16,
            lora_id=None,
            medium=medium,
            lora_name=None,
            extra_keys=[("salt",)] * len(hashes),
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )

    publish(stored(names[:5]))
    index = PrefixIndex()
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    events = EngineEvents(
        followed_deployment(endpoint, replay),
        index,
        lambda pool, engine: LAYOUT,
        SubscriptionObserver(),
        EventTiming(backoff_s=0.01),
    )
    events.start()
    try:
        await until(lambda: index.hits(LAYOUT, CHAIN, 161) == ({"decode": 80}, {}))
        publish(stored(names[5:]), stored(names[:2], medium="CPU"))
        await until(lambda: index.hits(LAYOUT, CHAIN, 161) == ({"decode": 160}, {}))
        publish(kv_events.BlockRemoved(block_hashes=names[3:4], medium="GPU", group_idx=0))
        await until(lambda: index.hits(LAYOUT, CHAIN, 161) == ({"decode": 48}, {}))
        publish(kv_events.AllBlocksCleared())
        await until(lambda: not index.num_blocks("decode"))
        assert index.state("decode") is EXACT
    finally:
        await events.close()
