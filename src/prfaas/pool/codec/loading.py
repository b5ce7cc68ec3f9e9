"""Loading the kernels without holding a transfer up.

Importing numba takes half a second, and compiling the kernels several, most of it under the
interpreter lock. So another process compiles and leaves the code on disk (numba's cache), and a
thread of this one loads it. Until then links send raw. They take 150 MiB, so they are loaded only
once an engine has announced blocks that a codec can code.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from prfaas.core.codec.codecs import EXPONENT_WINDOW, LOSSY, Form
from prfaas.core.codec.gain import CodecSpeed
from prfaas.core.kv.blocks import Plane, Planes

log = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 300.0
_PACKAGE = "prfaas.pool.codec"
_PROBE_VALUES = 128 << 10
_PROBE_REPEATS = 5


class Window(Protocol):
    """`exponent_window.py`, once it is imported."""

    def coded_bytes_max(self, num_bytes: int, /) -> int:
        """Room for a coded stream."""

    def encode(self, data: memoryview, planes: Planes, scratch: memoryview, /) -> memoryview | None:
        """Code a part of a block."""

    def decode(self, coded: memoryview, into: memoryview, /) -> None:
        """Restore a part of a block."""


class Rounding(Protocol):
    """`rounding.py`, once it is imported."""

    def round_block(self, form: Form, data: memoryview, rounded: memoryview, /) -> bytearray:
        """Code a block as a stream, and decode it again."""

    def restore_block(self, stream: memoryview, into: memoryview, /) -> Form:
        """Decode a stream."""


class Kernels:
    """The kernels of this process: absent, being loaded, or ready. Any thread may ask.

    Args:
        package: Package with the modules `exponent_window` and `kernels`.
    """

    def __init__(self, package: str = _PACKAGE) -> None:
        self._package = package
        self._lock = threading.Lock()
        self._waiting: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._is_stopped = False
        self._has_failed = False
        self.window: Window | None = None
        """The exact codec; None until it is ready."""
        self.rounding: Rounding | None = None
        """The rounded forms; None until they are ready."""
        self.speed = CodecSpeed()
        """Figures measured on this host, once it is ready."""

    @property
    def names(self) -> list[str]:
        """Codecs that this host has or will have; none without numba."""
        return [EXPONENT_WINDOW, LOSSY] if importlib.util.find_spec("numba") is not None else []

    def load(self, then: Callable[[], None] = lambda: None) -> None:
        """Begin to load, once a process.

        Args:
            then: Called when the kernels are ready, at once or on the loading thread; never if they
                cannot be had.
        """
        with self._lock:
            if self._has_failed:
                return
            if self.window is None:
                self._waiting.append(then)
                if self._thread is None and self.names:
                    self._is_stopped = False
                    self._thread = threading.Thread(target=self._load, name="prfaas-codecs")
                    self._thread.start()
                return
        then()

    def stop(self) -> None:
        """Cancel the compilation: the process is stopping."""
        with self._lock:
            self._is_stopped = True
            self._waiting.clear()
            if self._child is not None:
                self._child.terminate()

    def _load(self) -> None:
        try:
            window = self._import()
        except Exception as error:  # A codec must not take a pool node down.
            log.warning("links send blocks raw: the codec's kernels cannot be had: %r", error)
            with self._lock:
                self._has_failed = True
                self._waiting.clear()
            return
        if window is None:
            self._thread = None
            return
        self.speed = _speed(window)
        with self._lock:
            self.window = window
            waiting, self._waiting = self._waiting, []
        log.info(
            "codec %s is ready: %.1f GB/s in, %.1f GB/s out a core",
            EXPONENT_WINDOW,
            self.speed.encode / 1e9,
            self.speed.decode / 1e9,
        )
        for then in waiting:
            then()

    def _import(self) -> Window | None:
        if not _is_compiled():
            self._compile()
        if self._is_stopped:
            return None
        module: Any = importlib.import_module(f"{self._package}.exponent_window")
        window: Window = module
        rounding: Any = importlib.import_module(f"{_PACKAGE}.rounding")
        self.rounding = rounding
        return window

    def _compile(self) -> None:
        """Have the kernels compiled by another process, which leaves them on disk."""
        command = [sys.executable, "-c", f"import {self._package}.kernels, {_PACKAGE}.rounding"]
        with self._lock:
            if self._is_stopped:
                return
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, process_group=0
            )
        with self._child as child:
            try:
                child.wait(COMPILE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()


def _is_compiled() -> bool:
    """Return True if numba has left code of the kernels beside them; it may be out of date."""
    kept = Path(__file__).parent / "__pycache__"
    last = ("kernels.decode_window", "rounding_kernels.decode_state")
    return all(any(kept.glob(f"{name}-*.nbc")) for name in last)


def _speed(window: Window) -> CodecSpeed:
    """Measure the codec by the time of this thread alone, which others' load does not change."""
    # Two exponents, as of real numbers: the content does not change the time otherwise.
    data = memoryview(b"\x12\x3f\x34\xbe" * (_PROBE_VALUES // 2))
    scratch = memoryview(bytearray(window.coded_bytes_max(len(data))))
    restored = memoryview(bytearray(len(data)))
    planes = (Plane("bfloat16", len(data)),)
    coded = memoryview(b"")

    def encode() -> None:
        nonlocal coded
        coded = window.encode(data, planes, scratch) or coded

    def decode() -> None:
        window.decode(coded, restored)

    return CodecSpeed(*(len(data) / _fastest_s(work) for work in (encode, decode)))


def _fastest_s(work: Callable[[], None]) -> float:
    taken = []
    for _ in range(_PROBE_REPEATS):
        began = time.thread_time_ns()
        work()
        taken.append(time.thread_time_ns() - began)
    return max(1, min(taken)) / 1e9


KERNELS = Kernels()
"""Codecs of this process."""
