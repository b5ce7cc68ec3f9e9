"""The timing engine reads and answers as vLLM does; needs vLLM to import, not to run."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from prfaas.engines.timing import kv_events as ours
from tests.engines.vllm_modules import needing_vllm

pytestmark = pytest.mark.timeout(180)


def test_vllm_reads_our_kv_events() -> None:
    theirs: Any = needing_vllm("vllm.distributed.kv_events")
    hashes = [b"a" * 32, b"b" * 32]
    stored: Any = {
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": list(range(32)),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [("salt",), None],
        "group_idx": 1,
        "kv_cache_spec_kind": "mamba",
    }
    batch = ours.KvEventMessage(
        1.5,
        [
            ours.BlockStored(**stored),
            ours.BlockRemoved(hashes[:1], "GPU", 1),
            ours.AllBlocksCleared(),
        ],
        0,
    )
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=theirs.KVEventBatch)
    assert read == theirs.KVEventBatch(
        ts=1.5,
        events=[
            theirs.BlockStored(**stored),
            theirs.BlockRemoved(block_hashes=hashes[:1], medium="GPU", group_idx=1),
            theirs.AllBlocksCleared(),
        ],
        data_parallel_rank=0,
    )
    # And nothing is written in another way: maps of the same keys.
    assert msgspec.msgpack.encode(read) == msgspec.msgpack.encode(batch)


def test_the_kinds_of_groups_are_vllms() -> None:
    from prfaas.engines.timing.device_cache import _SPEC_KINDS

    theirs = needing_vllm("vllm.v1.kv_cache_interface").KVCacheSpecKind
    assert set(_SPEC_KINDS.values()) <= {kind.value for kind in theirs}
