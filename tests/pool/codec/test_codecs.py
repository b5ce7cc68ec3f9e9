"""The exponent window: every bit comes back, and nothing but a `PeerError` for anything else."""

import contextlib
import random
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.kv.blocks import Plane, Planes, merged
from prfaas.errors import PeerError
from prfaas.pool.codec import kernels
from prfaas.pool.codec.exponent_window import coded_bytes_max, decode, encode
from prfaas.pool.codec.loading import Kernels
from tests.pool.bfloat16_numbers import normal

BF16 = "bfloat16"
SPECIALS = [0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x8001, 0x007F, 0x0000, 0x8000, 0x3F80]
"""Infinities, NaNs with payloads, denormals, zeros, one."""


def coded(data: bytes, planes: Planes | None = None) -> bytes | None:
    scratch = memoryview(bytearray(coded_bytes_max(len(data))))
    found = encode(
        memoryview(data), (Plane(BF16, len(data)),) if planes is None else planes, scratch
    )
    return None if found is None else bytes(found)


def restored(stream: bytes, num_bytes: int) -> bytes:
    into = memoryview(bytearray(num_bytes))
    decode(memoryview(stream), into)
    return bytes(into)


def stays(data: bytes, planes: Planes | None = None) -> float:
    """Ratio of data that comes back bit by bit."""
    stream = coded(data, planes)
    if stream is None:
        return 1.0
    assert restored(stream, len(data)) == data
    return len(data) / len(stream)


@st.composite
def odd_numbers(draw: st.DrawFn) -> bytes:
    """Normal numbers with specials among them, of any size."""
    num_values = draw(st.integers(0, 3 * kernels.CHUNK_VALUES))
    data = bytearray(
        normal(num_values, draw(st.sampled_from([1e-30, 1.0, 1e30])), draw(st.integers(0, 9)))
    )
    share = draw(st.sampled_from([0.0, 0.001, 0.05, 1.0]))
    dice = random.Random(draw(st.integers(0, 99)))
    for at in range(0, len(data), 2):
        if dice.random() < share:
            data[at : at + 2] = dice.choice(SPECIALS).to_bytes(2, "little")
    return bytes(data) + draw(st.sampled_from([b"", b"x"]))


@settings(max_examples=60)
@given(odd_numbers())
def test_every_bit_of_odd_numbers_comes_back(data: bytes) -> None:
    stays(data)


@settings(max_examples=60)
@given(st.binary(max_size=3000))
def test_every_bit_of_noise_comes_back(data: bytes) -> None:
    stays(data)


@given(st.integers(0, 0xFFFF), st.integers(0, 3000))
def test_equal_numbers_come_back(value: int, num_values: int) -> None:
    data = value.to_bytes(2, "little") * num_values
    ratio = stays(data)

    assert ratio > 1.3 or num_values < 500 or value in range(0x7F80, 0x8000) or value >= 0xFF80


def test_all_65536_numbers_come_back() -> None:
    data = np.arange(1 << 16, dtype=np.uint16).tobytes()
    window = np.repeat(np.arange(1 << 16, dtype=np.uint16), 2).tobytes()

    assert stays(data) >= 1.0
    assert stays(window) >= 1.0
    assert stays(data[: kernels.CHUNK_VALUES] + normal(1 << 16)) > 1.2


@pytest.mark.parametrize("num_bytes", [0, 1, 2, 3, 4, 5, 7, 16383, 16384, 16385, 16388, 70_001])
def test_any_size_comes_back(num_bytes: int) -> None:
    stays(normal(40_000)[:num_bytes])


def test_numbers_of_trained_models_shrink_by_a_third() -> None:
    """Normal, as weights and values are, and with outlier channels, as keys have."""
    outliers = np.random.default_rng(1).standard_normal((2048, 128))
    outliers[:, [3, 17, 90]] *= 60
    keys = (outliers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()

    assert stays(normal(1 << 18)) > 1.33
    assert stays(keys) > 1.32


def test_noise_is_not_coded() -> None:
    assert coded(random.Random(0).randbytes(1 << 16)) is None
    assert coded(normal(1 << 15), (Plane("float32", 1 << 16),)) is None


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from([BF16, "float32", "uint8"]), st.integers(1, 9000)), max_size=12
    )
)
def test_planes_of_any_size_come_back(found: list[tuple[str, int]]) -> None:
    planes = merged(Plane(*plane) for plane in found)
    stays(normal(60_000)[: sum(size for _, size in planes)], planes)


def test_a_block_of_many_small_planes_stays_in_its_room() -> None:
    data = normal(1 << 15)
    planes = tuple(Plane(("bfloat16", "uint8")[n % 2], 1) for n in range(9000))
    planes += (Plane(BF16, len(data) - 9000),)

    stays(data, planes)


STREAM = coded(normal(20_000)) or b""


@settings(max_examples=300)
@given(st.data())
def test_a_mutated_stream_is_a_peer_error_or_decodes_within_its_memory(data: st.DataObject) -> None:
    stream = bytearray(STREAM)
    for _ in range(data.draw(st.integers(1, 4))):
        # Headers of the three chunks are hit as often as bodies.
        at = data.draw(st.sampled_from([0, 24_582, 49_164])) + data.draw(st.integers(0, 8))
        where = data.draw(st.sampled_from([at, data.draw(st.integers(0, len(stream) - 1))]))
        stream[min(where, len(stream) - 1)] = data.draw(st.integers(0, 255))
    fenced = bytearray(b"#" * (40_000 + 200))
    with contextlib.suppress(PeerError):
        decode(memoryview(stream), memoryview(fenced)[100:-100])
    assert set(fenced[:100]) == set(fenced[-100:]) == {ord("#")}


@settings(max_examples=100)
@given(st.integers(0, len(STREAM) - 1))
def test_a_cut_stream_is_a_peer_error(size: int) -> None:
    with pytest.raises(PeerError):
        restored(STREAM[:size], 40_000)


@settings(max_examples=200)
@given(st.binary(max_size=200), st.integers(1, 5000))
def test_noise_is_a_peer_error_or_fits(noise: bytes, num_bytes: int) -> None:
    try:
        restored(noise, num_bytes)
    except PeerError:
        return


@pytest.mark.parametrize("num_bytes", [1, 39_998, 39_999, 40_001, 40_004, 1 << 20])
def test_a_stream_for_another_size_is_a_peer_error(num_bytes: int) -> None:
    with pytest.raises(PeerError, match="does not decode"):
        restored(STREAM, num_bytes)


def test_a_fragment_at_an_odd_byte_is_a_peer_error() -> None:
    with pytest.raises(PeerError, match="odd byte"):
        decode(memoryview(STREAM), memoryview(bytearray(40_001))[1:])


def test_a_bomb_of_empty_chunks_is_a_peer_error() -> None:
    with pytest.raises(PeerError):
        restored(bytes(6) * 1000, 1 << 20)


def test_kernels_are_loaded_on_a_thread_of_their_own() -> None:
    loaded, done = Kernels(), threading.Event()
    loaded.load(done.set)
    assert done.wait(120)
    assert loaded.window is not None
    assert loaded.speed.encode > 0

    at_once = threading.Event()
    loaded.load(at_once.set)
    assert at_once.is_set()


def test_a_host_without_numba_sends_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    loaded = Kernels()
    loaded.load()

    assert loaded.names == []
    assert loaded.window is None


def test_kernels_that_can_not_be_had_are_logged_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loaded = Kernels("prfaas.no_such_package")
    loaded.load()
    assert loaded._thread is not None
    loaded._thread.join(60)

    assert loaded.window is None
    assert "links send blocks raw" in caplog.text
