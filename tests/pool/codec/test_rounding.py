"""Rounded blocks: the error has a bound, and nothing but a `PeerError` for anything else."""

import contextlib
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from prfaas.core.codec.codecs import (
    GROUP_VALUES,
    KIVI_GROUP,
    CodedSegment,
    Form,
    LinkCodec,
    Quality,
    SegmentMode,
    UncodedGroup,
    form_of,
    read_head,
)
from prfaas.core.kv.blocks import BlockKey, CacheGroup, GroupKind, KvPage, Plane
from prfaas.core.transfer.link_scheduler import OutgoingBlock
from prfaas.errors import PeerError
from prfaas.pool.codec.layouts import KnownLayouts
from prfaas.pool.codec.rounding import restore_block, round_block
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.send.link_coding import LinkCoding
from tests.pool.bfloat16_numbers import normal

SPECIALS = [0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x8001, 0x007F, 0x0000, 0x8000, 0x7F7F]
"""Infinities, NaNs with payloads, denormals, zeros, the largest."""
Numbers = NDArray[np.float32]


def numbers(data: bytes | memoryview) -> Numbers:
    return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)


def rounded(form: Form, data: bytes) -> tuple[bytes, bytes]:
    """Return the stream of a block, and what it decodes to, at both ends the same."""
    into = memoryview(bytearray(len(data)))
    stream = bytes(round_block(form, memoryview(data), into))
    assert len(stream) == form.coded_bytes
    again = memoryview(bytearray(len(data)))
    assert restore_block(memoryview(stream), again) == form
    assert again == into
    return stream, bytes(into)


@st.composite
def blocks(draw: st.DrawFn, num_values: int) -> bytes:
    """Normal numbers, all equal ones, and specials among either."""
    seed, scale = draw(st.integers(0, 9)), draw(st.sampled_from([1e-37, 1e-30, 1.0, 1e30, 6e37]))
    data = bytearray(normal(num_values, scale, seed))
    if draw(st.booleans()):
        data[:] = data[:2] * num_values
    dice = random.Random(draw(st.integers(0, 99)))
    share = draw(st.sampled_from([0.0, 0.001, 0.05, 1.0]))
    for at in range(0, len(data), 2):
        if dice.random() < share:
            data[at : at + 2] = dice.choice(SPECIALS).to_bytes(2, "little")
    return bytes(data)


@settings(max_examples=80, deadline=None)
@given(st.data())
@pytest.mark.timeout(300)
def test_fp8_is_within_a_sixteenth_of_each_number(data: st.DataObject) -> None:
    num = data.draw(st.integers(1, 700))
    block = data.draw(blocks(num))
    _, back = rounded(Form((CodedSegment(SegmentMode.FP8, (num, 0, 0, 0)),)), block)
    before, after = numbers(block), numbers(back)
    for start in range(0, num, GROUP_VALUES):
        old, new = before[start : start + GROUP_VALUES], after[start : start + GROUP_VALUES]
        is_finite = np.isfinite(old)
        assert (np.isnan(new) == ~is_finite).all()
        if not is_finite.any():
            continue
        old, new = old[is_finite].astype(np.float64), new[is_finite].astype(np.float64)
        # The least step is 2^-16 of the largest power of two; 2^-126 is the least normal number.
        top = max(float(np.abs(old).max()), 2.0**-110)
        assert (np.abs(new - old) <= np.maximum(np.abs(old) / 16, top * 2.0**-16)).all()


@settings(max_examples=80, deadline=None)
@given(st.data())
@pytest.mark.timeout(300)
def test_kivi_is_within_half_a_step_of_each_number(data: st.DataObject) -> None:
    tokens, heads = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 3))
    keys, values = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 70))
    by_token = data.draw(st.booleans())
    block = data.draw(blocks(tokens * heads * (keys + values)))
    sizes = tokens, heads, keys, values
    _, back = rounded(Form((CodedSegment(SegmentMode.KIVI4, sizes, 1, by_token),)), block)
    shape = (tokens, heads, -1) if by_token else (heads, tokens, -1)
    old, new = (numbers(each).reshape(shape) for each in (block, back))
    if by_token:
        old, new = old.transpose(1, 0, 2), new.transpose(1, 0, 2)
    for head in range(heads):
        for token in range(0, tokens, KIVI_GROUP):
            some = np.s_[head, token : token + KIVI_GROUP, :keys]
            for channel in range(keys):
                _is_near(old[some][:, channel], new[some][:, channel])
        for token in range(tokens):
            for channel in range(0, values, KIVI_GROUP):
                part = np.s_[head, token, keys + channel : keys + min(channel + KIVI_GROUP, values)]
                _is_near(old[part], new[part])


def _is_near(old: Numbers, new: Numbers) -> None:
    """A group is within half a step, or NaN for a number that is not finite or above 2^126."""
    if not np.isfinite(old).all() or np.abs(old).max() >= 2.0**126:
        assert np.isnan(new).all()
        return
    wide, back = old.astype(np.float64), new.astype(np.float64)
    step = (wide.max() - wide.min()) / 15
    # The step is itself rounded to bfloat16, by up to 1/256 of each of 15, and so is the result.
    allowed = step * (0.5 + 15 / 256) + np.abs(wide) / 128 + 15 * 2.0**-126
    assert (np.abs(back - wide) <= allowed).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300))
@pytest.mark.timeout(300)
def test_state_is_the_nearest_bfloat16(bits: list[int]) -> None:
    block = np.array(bits, np.uint32).tobytes()
    _, back = rounded(Form((CodedSegment(SegmentMode.STATE, (len(bits), 0, 0, 0)),)), block)
    old, new = np.frombuffer(block, np.float32), np.frombuffer(back, np.float32)
    assert (np.isnan(old) == np.isnan(new)).all()
    assert not (np.frombuffer(back, np.uint32) & 0xFFFF).any()
    fine = np.isfinite(old) & np.isfinite(new)
    error = np.abs(new[fine].astype(np.float64) - old[fine])
    assert (error <= np.maximum(np.abs(old[fine]) / 256, 2.0**-133)).all()


def kv_form(quality: Quality = Quality.KIVI4) -> tuple[Form, bytes]:
    """The form of two layers of 16 tokens, and such a block."""
    page = KvPage(2, 16, 2, 32, 32, is_token_major=False)
    num = page.num_bytes
    group = CacheGroup(0, GroupKind.FULL_ATTENTION, 16, num, 0, (Plane("bfloat16", num),), (page,))
    form = form_of(group, quality)
    assert isinstance(form, Form)
    return form, normal(num // 2)


@settings(max_examples=300, deadline=None)
@given(st.data())
@pytest.mark.timeout(300)
def test_a_mutated_stream_is_refused_or_decodes_within_its_block(data: st.DataObject) -> None:
    form, block = kv_form(data.draw(st.sampled_from([Quality.FP8, Quality.KIVI4])))
    stream = bytearray(rounded(form, block)[0])
    if data.draw(st.booleans()):
        stream = stream[: data.draw(st.integers(0, len(stream) - 1))]
    for _ in range(data.draw(st.integers(0, 5))):
        if stream:
            head = data.draw(st.sampled_from([len(form.head), len(stream)]))
            at = data.draw(st.integers(0, min(head, len(stream)) - 1))
            stream[at] = data.draw(st.integers(0, 255))
    guarded = bytearray(b"\xa5" * 64 + bytes(len(block)) + b"\xa5" * 64)
    with contextlib.suppress(PeerError):
        restore_block(memoryview(stream), memoryview(guarded)[64:-64])
    assert guarded[:64] == guarded[-64:] == b"\xa5" * 64


@pytest.mark.parametrize(
    "segment",
    [
        CodedSegment(SegmentMode.FP8, (1 << 28, 0, 0, 0)),
        CodedSegment(SegmentMode.RAW, (1, 0, 0, 0), 1 << 28),
        CodedSegment(SegmentMode.KIVI4, (1 << 28, 1 << 28, 1 << 28, 1 << 28), 1 << 28),
    ],
)
def test_a_head_that_claims_more_than_its_block_is_refused(segment: CodedSegment) -> None:
    with pytest.raises(PeerError, match="claims"):
        read_head(Form((segment,)).head, 4096)


def test_a_segment_within_a_number_is_refused() -> None:
    form = Form(
        (CodedSegment(SegmentMode.RAW, (1, 0, 0, 0)), CodedSegment(SegmentMode.FP8, (8, 0, 0, 0)))
    )
    with pytest.raises(PeerError, match="within a number"):
        read_head(form.head + bytes(form.coded_bytes - len(form.head)), form.decoded_bytes)


@pytest.mark.parametrize(
    ("kind", "planes", "quality", "reason"),
    [
        (GroupKind.FULL_ATTENTION, (), Quality.FP8, "are not known"),
        (GroupKind.FULL_ATTENTION, (Plane("float8_e4m3fn", 64),), Quality.FP8, "float8_e4m3fn"),
        (GroupKind.FULL_ATTENTION, (Plane("float8_e4m3fn", 64),), Quality.KIVI4, "float8_e4m3fn"),
        (GroupKind.FULL_ATTENTION, (Plane("bfloat16", 64),), Quality.KIVI4, "told apart"),
        (GroupKind.LINEAR_STATE, (Plane("float32", 64),), Quality.KIVI4, "linear state"),
        (GroupKind.LINEAR_STATE, (Plane("bfloat16", 64),), Quality.FP8_STATE, "not in float32"),
        (GroupKind.FULL_ATTENTION, (Plane("bfloat16", 64),), Quality.STATE, "not rounded"),
        (GroupKind.FULL_ATTENTION, (Plane("bfloat16", 64),), Quality.LOSSLESS, "lossless"),
        (GroupKind.FULL_ATTENTION, (Plane("bfloat16", 4),), Quality.FP8, "too small"),
    ],
)
def test_a_group_that_cannot_be_rounded_has_a_reason(
    kind: GroupKind, planes: tuple[Plane, ...], quality: Quality, reason: str
) -> None:
    num_bytes = sum(plane.num_bytes for plane in planes) or 64
    found = form_of(CacheGroup(0, kind, 16, num_bytes, 0, planes), quality)
    assert isinstance(found, UncodedGroup)
    assert reason in found.reason


def test_state_of_a_linear_layer_is_rounded_by_its_own_switch_alone() -> None:
    planes = (Plane("bfloat16", 640), Plane("float32", 6400), Plane("bfloat16", 640))
    group = CacheGroup(1, GroupKind.LINEAR_STATE, 512, 7680, 0, planes)
    form = form_of(group, Quality.FP8_STATE)
    assert isinstance(form, Form)
    assert form.modes == {SegmentMode.STATE}
    block = np.random.default_rng(0).bytes(7680)
    _, back = rounded(form, block)
    assert (back[:640], back[-640:]) == (block[:640], block[-640:])


def test_blocks_that_a_lane_rounds_lie_in_the_same_memory() -> None:
    """New pages for each block took as long as coding it."""
    rooms: list[memoryview] = []

    def round_block(_form: object, _data: memoryview, rounded: memoryview) -> bytearray:
        rooms.append(rounded)
        return bytearray(1)

    kernels: Any = SimpleNamespace(rounding=SimpleNamespace(round_block=round_block), names=[])
    coding = LinkCoding(LinkCodec.AUTO, KnownLayouts(), "pd-pool", PoolMetrics(), kernels)
    form: Any = None
    for size in (4096, 4096, 100):
        name = bytes(32), BlockKey(0, bytes(32))
        coding._rounded(OutgoingBlock(bytes(16), name, b"", bytes(size)), form)
    assert [len(room) for room in rooms] == [4096, 4096, 100]
    assert len({id(room.obj) for room in rooms}) == 1
