"""Codecs of links: what is coded, what that gains, when a link codes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.codec.codecs import EXPONENT_WINDOW, LinkCodec, codec_of, expected_ratio
from prfaas.core.codec.gain import (
    GAIN_MIN,
    CodecSpeed,
    EndLoad,
    link_rates,
)
from prfaas.core.codec.switch import (
    GROUPS_MAX,
    SAMPLES_TO_CHANGE,
    SKIPPED_MAX,
    CodingSwitch,
    Trials,
)
from prfaas.core.kv.blocks import PLANES_MAX, Plane, merged, part

GBIT = 1e9 / 8
SPEED = CodecSpeed(3e9, 3e9)
ATTENTION = (Plane("bfloat16", 1 << 21),)
STATE = (Plane("bfloat16", 3 << 10), Plane("float32", 1 << 20)) * 8
planes = st.lists(
    st.tuples(st.sampled_from(["bfloat16", "float32", "uint8"]), st.integers(1, 50)), max_size=20
).map(lambda found: tuple(Plane(*plane) for plane in found))


def test_attention_in_bfloat16_is_coded_and_state_is_not() -> None:
    assert codec_of(ATTENTION) == EXPONENT_WINDOW
    assert expected_ratio(ATTENTION) == pytest.approx(1.33)
    assert codec_of(STATE) is None
    assert codec_of((Plane("float16", 100),)) is None
    assert codec_of(()) is None
    assert expected_ratio(()) == 1.0


@given(planes)
def test_neighbours_of_one_type_are_one_plane(found: tuple[Plane, ...]) -> None:
    joined = merged(found)

    assert all(one.dtype != other.dtype for one, other in itertools.pairwise(joined))
    assert b"".join(p.dtype[:1].encode() * p.num_bytes for p in joined) == b"".join(
        p.dtype[:1].encode() * p.num_bytes for p in found
    )


def test_a_group_of_too_many_planes_is_announced_without() -> None:
    assert merged([Plane("bfloat16", 2), Plane("float32", 4)] * PLANES_MAX) == ()


@given(planes, st.integers(0, 1000), st.integers(1, 1000))
def test_a_part_of_a_block_has_the_planes_of_its_bytes(
    found: tuple[Plane, ...], offset: int, num_bytes: int
) -> None:
    types = b"".join(p.dtype[:1].encode() * p.num_bytes for p in found)
    inside = part(found, offset, num_bytes)

    assert all(plane.num_bytes > 0 for plane in inside)
    assert (
        b"".join(p.dtype[:1].encode() * p.num_bytes for p in inside)
        == types[offset : offset + num_bytes]
    )


@pytest.mark.parametrize("gbits", [0.1, 1, 5, 10])
def test_a_link_that_the_network_limits_gains_the_ratio(gbits: float) -> None:
    rates = link_rates(gbits * GBIT, 1.33, SPEED, EndLoad(0.2), EndLoad(0.3))

    assert rates.gain == pytest.approx(1.33)


def test_a_link_faster_than_the_codec_gains_nothing() -> None:
    assert link_rates(100 * GBIT, 1.33, SPEED).gain < 1


def test_a_busy_thread_is_the_limit_and_not_the_network() -> None:
    """Encryption at 1 GB/s a core: a quarter of it saved is worth less than a slow codec takes."""
    busy = EndLoad(0.95)

    assert link_rates(1e9, 1.33, CodecSpeed(10e9, 10e9), busy, busy).gain > GAIN_MIN
    assert link_rates(1e9, 1.33, SPEED, busy, busy).gain < 1
    assert link_rates(1e9, 1.33, SPEED, EndLoad(0.3), busy).gain < 1


@given(
    st.floats(1e5, 1e11),
    st.floats(1, 2),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(1e8, 1e11),
)
def test_rates_are_positive_and_never_above_what_an_end_can_do(
    wire: float, ratio: float, sender: float, receiver: float, speed: float
) -> None:
    rates = link_rates(wire, ratio, CodecSpeed(speed, speed), EndLoad(sender), EndLoad(receiver))

    assert 0 < rates.coded <= speed * 1.0001
    assert rates.raw > 0


def run(switch: CodingSwitch, *sample: float, times: int = SAMPLES_TO_CHANGE) -> None:
    for _ in range(times):
        switch.sample(*sample)


def test_a_link_codes_until_it_is_measured_and_stays_on_behind_a_slow_network() -> None:
    switch = CodingSwitch(LinkCodec.AUTO, SPEED)
    assert switch.is_on

    run(switch, GBIT, 1.33, 0.3, 0.3, times=50)
    assert switch.is_on
    assert switch.gain == pytest.approx(1.33)


def test_coding_turns_itself_off_where_a_thread_is_the_limit() -> None:
    switch = CodingSwitch(LinkCodec.AUTO, SPEED)

    run(switch, 0.75e9, 1.33, 1.0, 1.0)

    assert not switch.is_on


def test_coding_turns_itself_off_where_the_network_is_not_the_limit() -> None:
    """Threads that wait for the interpreter or for each other are not busy, and still the limit."""
    switch = CodingSwitch(LinkCodec.AUTO, CodecSpeed(10e9, 10e9))

    run(switch, GBIT, 1.33, 0.4, 0.4, 0.1, times=10)
    assert not switch.is_on

    run(switch, GBIT, 1.33, 0.4, 0.4, 0.95, times=10)
    assert switch.is_on


def test_coding_comes_back_when_the_network_is_the_limit_again() -> None:
    switch = CodingSwitch(LinkCodec.AUTO, SPEED)
    run(switch, 0.75e9, 1.33, 1.0, 1.0)

    run(switch, GBIT, 1.33, 0.3, 0.3, times=40)

    assert switch.is_on


def test_one_moment_changes_nothing() -> None:
    switch = CodingSwitch(LinkCodec.AUTO, SPEED)
    run(switch, GBIT, 1.33, 0.3, 0.3, times=20)

    run(switch, GBIT, 1.33, 1.0, 1.0, times=SAMPLES_TO_CHANGE - 1)

    assert switch.is_on


@pytest.mark.parametrize(("mode", "is_on"), [(LinkCodec.RAW, False), (LinkCodec.ALWAYS, True)])
def test_the_operators_word_is_not_overruled(mode: LinkCodec, is_on: bool) -> None:
    switch = CodingSwitch(mode, SPEED)

    run(switch, 10e9, 1.33, 1.0, 1.0, times=20)

    assert switch.is_on is is_on


def test_what_does_not_shrink_is_tried_less_and_less_often() -> None:
    trials = Trials()
    tried = []
    for number in range(20_000):
        if trials.should_try(b"L", 0):
            tried.append(number)
            trials.tried(b"L", 0, has_shrunk=False)

    waits = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert waits[:5] == [2, 3, 5, 9, 17]
    assert max(waits) == SKIPPED_MAX + 1


def test_a_group_that_shrinks_again_is_tried_every_time() -> None:
    trials = Trials()
    trials.tried(b"L", 0, has_shrunk=False)
    assert not trials.should_try(b"L", 0)
    assert trials.should_try(b"L", 1)

    assert trials.should_try(b"L", 0)
    trials.tried(b"L", 0, has_shrunk=True)

    assert all(trials.should_try(b"L", 0) for _ in range(10))


def test_groups_without_end_do_not_fill_memory() -> None:
    trials = Trials()
    for group in range(3 * GROUPS_MAX):
        trials.tried(b"L", group, has_shrunk=False)

    assert len(trials._skips) == GROUPS_MAX
