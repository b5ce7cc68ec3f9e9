"""Connection of this process to a Ray cluster; `ray` is an optional dependency."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import threading
from collections.abc import Iterator

from prfaas.errors import ConfigError

CONNECT_TIMEOUT_S = 5.0
AUTO = "auto"
"""Address of the cluster that runs on this machine."""


@contextlib.contextmanager
def ray_cluster(address: str, namespace: str | None = None) -> Iterator[None]:
    """Connect to a Ray cluster while the context is open.

    Args:
        address: HOST:PORT of the head's GCS, or "auto".
        namespace: Of named actors; None is a namespace of this process alone.

    Raises:
        ConfigError: Ray is not installed, or no cluster answers.
    """
    check_installed()
    if address != AUTO:
        _check_reachable(address)
    # Statistics of Ray's use go to a server of its authors unless this is set.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    on_end = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # Ray raises ValueError, ConnectionError, RuntimeError and its own
        text = " ".join(str(error).split())
        raise ConfigError(
            f"no Ray cluster can be joined at {address!r}: {text[:400]}; start one with `ray start "
            "--head`, or name another address"
        ) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_end)  # Ray has put its own there
    try:
        yield
    finally:
        ray.shutdown()


def check_installed() -> None:
    """Raise `ConfigError` if the package `ray` is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray is not installed here; install it with: pip install 'prfaas[ray]'")


def _check_reachable(address: str) -> None:
    # Ray's own client waits for a minute and then ends the process.
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536 or "://" in address:
        raise ConfigError(
            f"{address!r} is not the address of a Ray cluster: expected HOST:PORT of its head "
            f'(6379 by default), or "{AUTO}" for the cluster on this machine'
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster answers at {address}: {error.strerror or error}; start one with `ray "
            "start --head`, or name another address"
        ) from None
