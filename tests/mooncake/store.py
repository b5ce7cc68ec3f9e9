"""The master and providers of a store. Ports are free ones; processes are ended by their ids.

Run as a module it is a provider: it prints its address, and ends with stdin.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from prfaas.errors import ConfigError
from prfaas.pool.shared.mooncake.client import check_library

SEGMENT_BYTES = 64 << 20
LEASE_MS = 500


@cache
def missing() -> str:
    """Parts of a store that this machine lacks, in words; empty if none."""
    try:
        check_library()
    except ConfigError as error:
        return str(error)
    return ""


class Process:
    """A process of the store.

    Args:
        command: Its command.
    """

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def wait_for(self, start: str) -> None:
        """Wait for a line."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(start):
                return
        raise AssertionError(f"{self._process.args!r} has ended")

    @property
    def is_running(self) -> bool:
        """Return True until it has ended."""
        return self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)
        if number is signal.SIGKILL:
            self._process.wait()

    def end(self) -> None:
        """Kill it, if it runs."""
        with self._process:
            self._process.kill()


class Store:
    """A store.

    Attributes:
        port: Of the master.
        master: Its process.
        providers: Theirs.
    """

    def __init__(self, num_providers: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._segment_bytes = segment_bytes
        self.port = _free_port()
        self.master = self._start_master()
        self.providers = [self._start_provider() for _ in range(num_providers)]
        self._ended: list[Process] = []

    def replace_master(self) -> None:
        """Start another master, with the same port and without any object."""
        self._ended.append(self.master)
        self.master = self._start_master()

    def add_provider(self) -> None:
        """Start another provider."""
        self.providers.append(self._start_provider())

    def end(self) -> None:
        """End all processes."""
        for process in [*self.providers, self.master, *self._ended]:
            process.end()

    def _start_master(self) -> Process:
        place = importlib.util.find_spec("mooncake")
        assert place is not None
        assert place.submodule_search_locations is not None
        master = Process(
            str(Path(place.submodule_search_locations[0]) / "mooncake_master"),
            f"--rpc_port={self.port}",
            "--rpc_address=127.0.0.1",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={_free_port()}",
            f"--default_kv_lease_ttl={LEASE_MS}",
            "--logtostderr",
        )
        while not _listens(self.port):
            assert master.is_running, "the master has ended"
            time.sleep(0.02)
        return master

    def _start_provider(self) -> Process:
        provider = Process(
            sys.executable, "-m", "tests.mooncake.store", str(self.port), str(self._segment_bytes)
        )
        provider.wait_for("ready")
        return provider


@contextmanager
def running_store(num_providers: int = 1, segment_bytes: int = SEGMENT_BYTES) -> Iterator[Store]:
    """A store without objects.

    Args:
        num_providers: Its providers.
        segment_bytes: Memory of each.
    """
    store = Store(num_providers, segment_bytes)
    try:
        yield store
    finally:
        store.end()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def main() -> None:
    """Provide memory until stdin ends."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    master = f"127.0.0.1:{sys.argv[1]}"
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 1 << 24, "tcp", "", master)
    sys.stdout.write(f"{'ready' if code == 0 else 'failed'} {code}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
