"""Buffers of an arena: never one memory for two, never more than the limit."""

import gc
import mmap
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.pool.store import arena as module
from prfaas.pool.store.arena import SMALL_BYTES, Arena, charged_bytes

MIB = 1 << 20
SIZES = st.one_of(
    st.integers(1, 200),
    st.integers(SMALL_BYTES - 1, SMALL_BYTES + 1),
    st.sampled_from([MIB // 4, MIB // 2 + 1, MIB, MIB + 1]),
)


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * mmap.PAGESIZE


@given(steps=st.lists(st.one_of(SIZES, st.none()), max_size=40))
def test_buffers_do_not_overlap_and_stay_under_the_limit(steps: list[int | None]) -> None:
    """A number takes a buffer of that size, None lets the oldest go."""
    arena = Arena(2 * MIB)
    held: list[tuple[int, memoryview]] = []
    for number, step in enumerate(steps):
        if step is None:
            if held:
                held.pop(0)
            continue
        buffer = arena.allocate(step)
        used = sum(charged_bytes(len(other)) for _, other in held)
        assert (buffer is None) == (used + charged_bytes(step) > 2 * MIB)
        if buffer is not None:
            assert len(buffer) == step
            buffer[:] = bytes([number % 251]) * step
            held.append((number, buffer))
            del buffer
        assert arena.used_bytes == sum(charged_bytes(len(other)) for _, other in held)
    for number, buffer in held:
        assert buffer == bytes([number % 251]) * len(buffer)


def test_a_buffer_comes_back_with_its_last_view() -> None:
    arena = Arena(MIB)
    buffer = arena.allocate(MIB)
    assert buffer is not None
    view = buffer[5:10]
    del buffer
    assert arena.used_bytes == MIB
    assert arena.allocate(1) is None
    del view
    assert arena.used_bytes == 0
    assert arena.allocate(MIB) is not None


def test_another_mix_of_sizes_does_not_need_more_memory() -> None:
    arena = Arena(64 * MIB)
    before = resident_bytes()
    for size in (MIB, 2 * MIB, 700_000, MIB, 300_000):
        held: list[memoryview] = []
        while (buffer := arena.allocate(size)) is not None:
            buffer[:] = bytes(size)
            held.append(buffer)
        assert len(held) == 64 * MIB // charged_bytes(size)
        assert resident_bytes() - before < 66 * MIB
        del held, buffer


def test_memory_is_used_again_while_warm() -> None:
    arena = Arena(4 * MIB)
    buffer = arena.allocate(MIB)
    assert buffer is not None
    buffer[:5] = b"first"
    del buffer
    again = arena.allocate(MIB)
    assert again is not None
    assert bytes(again[:5]) == b"first"


def test_threads_take_and_let_go() -> None:
    arena = Arena(8 * MIB)
    broken: list[int] = []

    def work(number: int) -> None:
        for turn in range(300):
            buffer = arena.allocate((turn % 3 + 1) * 100_000)
            if buffer is not None:
                mark = bytes([number, turn % 251]) * 50_000
                buffer[:100_000] = mark
                if buffer[:100_000] != mark:
                    broken.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not broken
    assert arena.used_bytes == 0


def test_without_address_space_buffers_come_from_the_heap(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(module, "_Range", refuse)
    arena = Arena(2 * MIB)
    held = [arena.allocate(MIB) for _ in range(3)]
    assert [buffer is None for buffer in held] == [False, False, True]
    assert arena.used_bytes == 2 * MIB
    assert caplog.text.count("on the heap") == 1
    del held
    assert arena.used_bytes == 0
