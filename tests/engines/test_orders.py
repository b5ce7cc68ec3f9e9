"""Block parameters of requests, validated before they reach a pool node."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from prfaas.core.kv.blocks import CacheGroup, GroupKind, Layout
from prfaas.engines.orders import OrderedPush, PushOrder, WaitOrder, read_order

from .vllm_modules import needing_vllm

TRANSFER = "ab" * 16
PUSH = {"transfer": TRANSFER, "push_to": "pd-pool", "have_tokens": 16, "final_tokens": 64}
WAIT = {"transfer": TRANSFER, "source": "prfaas-pool", "wait_ms": 500}


def test_orders_of_both_legs_are_read() -> None:
    assert read_order({"prfaas": PUSH | {"ticket": "aGk="}}) == PushOrder(
        TRANSFER, "pd-pool", 16, 64, b"hi"
    )
    assert read_order({"prfaas": WAIT}) == WaitOrder(TRANSFER, "prfaas-pool", 500)
    pulled = {**PUSH, "wait": {**WAIT, "transfer": "cd" * 16}}
    order = read_order({"prfaas": pulled})
    assert isinstance(order, PushOrder)
    assert order.wait == WaitOrder("cd" * 16, "prfaas-pool", 500)
    nothings: list[dict[str, Any] | None] = [None, {}, {"prfaas": None}, {"other": 1}]
    for nothing in nothings:
        assert read_order(nothing) is None


@pytest.mark.parametrize(
    "order",
    [
        PUSH | {"transfer": "ab"},
        PUSH | {"transfer": "zz" * 16},
        PUSH | {"push_to": ""},
        PUSH | {"push_to": "x" * 65},
        PUSH | {"have_tokens": -1},
        PUSH | {"final_tokens": 2**60},
        PUSH | {"ticket": "not base64!"},
        PUSH | {"ticket": "A" * (1 << 20)},
        WAIT | {"transfer": 7},
        WAIT | {"wait_ms": -1},
        WAIT | {"wait_ms": "long"},
    ],
)
def test_what_a_pool_node_would_not_take_is_refused(order: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        read_order({"prfaas": order})


@pytest.mark.parametrize("parameters", [{"prfaas": "push_to"}, {"prfaas": ["source"]}])
def test_an_order_that_is_no_object_is_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        read_order(parameters)


@pytest.mark.timeout(180)
def test_an_order_beyond_the_prompt_costs_vllm_no_memory() -> None:
    base = needing_vllm("vllm.v1.kv_offload.base")
    module = needing_vllm("prfaas.engines.vllm_tier")
    sent: list[Any] = []
    tier = module.PrfaasTier.__new__(module.PrfaasTier)
    tier._layout = Layout(b"L" * 32, 16, "0", (CacheGroup(0, GroupKind.FULL_ATTENTION, 16, 1024),))
    tier._names = None
    tier._client = SimpleNamespace(send=sent.append)
    context = base.ReqContext(req_id="one")
    for end in (16, 32):
        context._offload_key_positions[base.make_offload_key(bytes([end]) * 32, 0)] = end
    for final_tokens, blocks in ((32, {0: bytes([16]) * 32 + bytes([32]) * 32}), (2**53, {})):
        order = PushOrder("ab" * 16, "pd-pool", final_tokens=final_tokens)
        tier._unannounced, ends = {"one": context}, context._offload_key_positions
        tier._announce(OrderedPush(order, tier._layout), "one", ends)
        assert sent[-1].blocks == blocks


def test_a_push_is_complete_once_all_that_is_wanted_was_stored() -> None:
    """The request may go on after that: the other side has all, checkpoints or not."""
    layout = Layout(
        b"L" * 32,
        16,
        "0",
        (
            CacheGroup(0, GroupKind.FULL_ATTENTION, 16, 1024),
            CacheGroup(1, GroupKind.LINEAR_STATE, 32, 2048),
        ),
    )
    hashes = [bytes([number]) * 32 for number in range(1, 5)]
    push = OrderedPush(PushOrder(TRANSFER, "pd-pool", 16, 64, checkpoint_tokens=32), layout)
    assert not push.is_complete
    push.announcement(hashes)
    blocks = [((0, name), 16 * n) for n, name in enumerate(hashes, 1)]
    assert push.take(blocks) == {(0, name) for name in hashes[1:]}
    assert not push.is_complete, "the state is missing"
    push.take([((1, hashes[3]), 64)])
    assert push.is_complete
    assert not push.rest([*blocks, ((1, hashes[3]), 64)])
    nothing = OrderedPush(PushOrder(TRANSFER, "pd-pool", 64, 64), layout)
    nothing.announcement(hashes)
    assert not nothing.is_complete, "its end says that nothing comes"


@pytest.mark.timeout(180)
def test_vllm_ends_a_push_with_its_last_block() -> None:
    base = needing_vllm("vllm.v1.kv_offload.base")
    tiers = needing_vllm("vllm.v1.kv_offload.tiering.base")
    module = needing_vllm("prfaas.engines.vllm_tier")
    sent: list[Any] = []
    tier = module.PrfaasTier.__new__(module.PrfaasTier)
    tier._layout = Layout(b"L" * 32, 16, "0", (CacheGroup(0, GroupKind.FULL_ATTENTION, 16, 1024),))
    tier._names, tier._kept, tier._unannounced = None, set(), {}
    tier._client = SimpleNamespace(send=sent.append)
    tier._requests = SimpleNamespace(submit=sent.append, end=lambda _: None)
    tier._lineage = SimpleNamespace(sources=lambda _: [])
    context = base.ReqContext(req_id="one")
    keys = [base.make_offload_key(bytes([end]) * 32, 0) for end in (16, 32, 48)]
    for number, key in enumerate(keys, 1):
        context._offload_key_positions[key] = 16 * number
    tier._pushes = {"one": OrderedPush(PushOrder(TRANSFER, "pd", final_tokens=32), tier._layout)}
    tier._unannounced = {"one": context}
    for job, key in enumerate(keys):
        tier.submit_store(
            tiers.TransferJob(
                job_id=job,
                keys=[key],
                chunk_ids=[job],
                req_context=context,
                is_promotion=False,
            )
        )
    tier.on_request_finished(context)
    kinds = [type(message).__name__ for message in sent]
    assert kinds == ["Push", "Store", "Store", "PushDone", "Store"]
    assert [store.pushed for store in sent if type(store).__name__ == "Store"] == [
        [True],
        [True],
        [False],
    ]
