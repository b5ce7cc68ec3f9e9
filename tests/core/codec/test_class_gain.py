"""Expected ratios and rates of quality classes."""

from __future__ import annotations

from math import inf

import pytest

from prfaas.core.codec.codecs import RATIOS, LinkCodec, Quality
from prfaas.core.codec.gain import SPEEDS, BlockCoder, BlockCoding, PlannedCoding, class_gain

GBIT = 1e9 / 8
ALWAYS = PlannedCoding(LinkCodec.ALWAYS)


@pytest.mark.parametrize("quality", [Quality.FP8, Quality.KIVI4])
def test_the_ratio_of_whole_groups_is_that_of_the_format(quality: Quality) -> None:
    gain = class_gain(quality)

    assert gain.attention == pytest.approx(RATIOS[quality], rel=1e-6)
    assert gain.state == 1
    assert gain.speed == SPEEDS[quality]


def test_small_blocks_gain_less_and_latents_nothing() -> None:
    assert class_gain(Quality.KIVI4, 16).attention == pytest.approx(2.91, abs=0.01)
    assert class_gain(Quality.KIVI4, has_pages=False).attention == 1
    assert class_gain(Quality.KIVI4, has_pages=False).speed is None
    assert class_gain(Quality.FP8, has_pages=False).attention == pytest.approx(1.98, abs=0.01)


def test_what_is_not_rounded_takes_the_codec_no_time() -> None:
    half = class_gain(Quality.KIVI4, attention_share=0.5)
    both = class_gain(Quality.KIVI4_STATE, attention_share=0.5)

    assert half.speed is not None
    assert half.speed.encode == pytest.approx(2 * SPEEDS[Quality.KIVI4].encode)
    assert both.speed is not None
    seconds = sum(0.5 / SPEEDS[part].encode for part in (Quality.KIVI4, Quality.STATE))
    assert both.speed.encode == pytest.approx(1 / seconds)


def test_lossless_rounds_nothing() -> None:
    assert class_gain(Quality.LOSSLESS).speed is None


def test_a_class_is_rounded_where_its_codec_is_the_limit_too() -> None:
    link = PlannedCoding(LinkCodec.AUTO, quality=Quality.KIVI4).of(25 * GBIT)

    assert link.attention_ratio("bfloat16") == pytest.approx(3.2)
    assert link.state_ratio("float32") == 1
    assert link.wire_bytes_per_s * 3.2 == pytest.approx(SPEEDS[Quality.KIVI4].encode)
    assert link.gain < 1


def test_a_group_in_another_format_goes_as_it_is() -> None:
    link = PlannedCoding(LinkCodec.AUTO, quality=Quality.FP8_STATE).of(GBIT)

    assert link.attention_ratio("float16") == 1
    assert link.state_ratio("bfloat16") == pytest.approx(1.33)
    assert link.state_ratio("float32") == 2


def test_a_raw_link_rounds_nothing() -> None:
    assert not PlannedCoding(LinkCodec.RAW, quality=Quality.FP8).of(GBIT).is_coding


@pytest.mark.parametrize(("lanes", "carried"), [(1, 4), (2, 8), (4, 10)])
def test_lanes_limit_what_a_link_carries(lanes: int, carried: float) -> None:
    coding = PlannedCoding(lanes=lanes, lane_bytes_per_s=4 * GBIT)

    assert not coding.is_raw
    assert coding.of(10 * GBIT).wire_bytes_per_s == pytest.approx(carried * GBIT)
    assert PlannedCoding().is_raw


def test_a_lane_that_is_busy_codes_where_that_saves_it_more_than_it_costs() -> None:
    """One core moves 0.5 GB/s: coding at 5 GB/s costs a tenth, and saves a quarter."""
    fast, slow = (
        PlannedCoding(
            LinkCodec.AUTO, lane_bytes_per_s=0.5e9, speed=type(ALWAYS.speed)(*2 * (rate,))
        )
        for rate in (5e9, 0.5e9)
    )

    link = fast.of(100 * GBIT)
    assert link.is_coding
    assert link.wire_bytes_per_s * link.ratio == pytest.approx(1 / (1 / (0.5e9 * 1.33) + 1 / 5e9))
    assert not slow.of(100 * GBIT).is_coding


def coder(planned: PlannedCoding, **qualities: Quality) -> BlockCoder:
    found = BlockCoder(BlockCoding(planned, "bfloat16", "float32", qualities), state_bytes=0)
    found.set_capacity(GBIT)
    return found


def test_tenants_have_their_classes_on_one_link() -> None:
    made = coder(PlannedCoding(LinkCodec.AUTO), cheap=Quality.FP8)

    assert made.wire_bytes(1330, is_last=False, tenant="other") == 1000
    assert made.wire_bytes(12_900, is_last=False, tenant="cheap") == 12_900 * 129 // 256
    assert made.wire_share == 1


def test_a_class_with_a_slow_codec_takes_more_of_the_link_and_sends_no_more() -> None:
    made = coder(PlannedCoding(LinkCodec.AUTO, rounding_bytes_per_s=0.16e9), cheap=Quality.KIVI4)
    assert made.set_capacity(GBIT) == GBIT

    counted = made.counted_bytes(32_000, is_last=False, tenant="cheap")

    assert made.wire_bytes(32_000, is_last=False, tenant="cheap") == 10_000
    assert counted == pytest.approx(10_000 * GBIT / (0.16e9 / 3.2))
    assert counted * made.wire_share == pytest.approx(10_000)
    assert PlannedCoding().lane_bytes_per_s == inf
