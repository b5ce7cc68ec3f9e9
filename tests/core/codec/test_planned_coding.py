"""Coding of links in plans and simulations: the rule of pool nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.codec.codecs import LinkCodec
from prfaas.core.codec.gain import BlockCoder, BlockCoding, CodecSpeed, PlannedCoding
from prfaas.core.codec.switch import CodingSwitch

GBIT = 1e9 / 8
AUTO = PlannedCoding(LinkCodec.AUTO)


@given(
    st.floats(1e6, 2e11),
    st.floats(1.03, 3),
    st.floats(1e8, 1e11),
    st.floats(1e8, 1e11),
)
def test_a_plan_codes_where_a_pool_node_would_start_to(
    wire_bytes_per_s: float, ratio: float, encode: float, decode: float
) -> None:
    speed = CodecSpeed(encode, decode)
    switch = CodingSwitch(LinkCodec.AUTO, speed)
    switch.is_on = False
    for _ in range(20):
        switch.sample(wire_bytes_per_s, ratio, sender_busy=0.0, receiver_busy=0.0)

    link = PlannedCoding(LinkCodec.AUTO, speed=speed, ratio=ratio).of(wire_bytes_per_s)

    assert link.is_coding == switch.is_on
    assert link.gain == pytest.approx(switch.gain)


def test_raw_never_codes_and_always_does_at_any_rate() -> None:
    fast = 100 * GBIT

    assert not PlannedCoding().of(GBIT).is_coding
    assert not AUTO.of(fast).is_coding
    assert AUTO.of(fast).gain < 1
    always = PlannedCoding(LinkCodec.ALWAYS).of(fast)
    assert always.is_coding
    assert always.wire_bytes_per_s * always.ratio == pytest.approx(2.5e9)


def test_more_cores_code_for_a_faster_link() -> None:
    link = PlannedCoding(LinkCodec.AUTO, cores=8).of(100 * GBIT)

    assert link.is_coding
    assert link.wire_bytes_per_s == 100 * GBIT


def test_a_codec_that_is_the_limit_leaves_the_network_idle() -> None:
    link = AUTO.of(16 * GBIT)

    assert link.is_coding
    assert link.wire_bytes_per_s * link.ratio == pytest.approx(2.5e9)
    assert link.wire_bytes_per_s < 16 * GBIT


@pytest.mark.parametrize(
    ("dtype", "ratio"), [("bfloat16", 1.33), ("float32", 1), ("float16", 1), ("fp8_ds_mla", 1)]
)
def test_only_bfloat16_shrinks(dtype: str, ratio: float) -> None:
    assert AUTO.of(GBIT).ratio_of(dtype) == ratio


def test_a_ratio_below_the_least_is_sent_raw() -> None:
    assert not PlannedCoding(LinkCodec.ALWAYS, ratio=1.02).of(GBIT).is_coding


def test_state_is_the_end_of_a_transfer() -> None:
    coder = BlockCoder(BlockCoding(AUTO, "bfloat16", "float32"), state_bytes=1000)
    coder.set_capacity(GBIT)

    assert coder.wire_bytes(1330, is_last=False) == 1000
    assert coder.wire_bytes(2330, is_last=True) == 2000
    assert coder.wire_bytes(300, is_last=True) == 300
    coder.set_capacity(100 * GBIT)
    assert coder.wire_bytes(1330, is_last=False) == 1330


def test_a_link_that_is_cut_sends_nothing() -> None:
    coder = BlockCoder(BlockCoding(AUTO, "bfloat16", "float32"), state_bytes=0)

    assert coder.set_capacity(0.0) == 0
