"""A process that writes an audit log, and what is read of it.

python -m tests.audit.writing FOLDER MODE
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from pathlib import Path

from prometheus_client import CollectorRegistry

from prfaas.audit.metrics import AuditMetrics
from prfaas.audit.settings import AuditSettings
from prfaas.audit.writer import AuditLog

PROCESS = "pd-pool"
ENDLESS, TORN = "endless", "torn"


def audit_log(settings: AuditSettings) -> tuple[AuditLog, CollectorRegistry]:
    """A log with metrics of its own."""
    registry = CollectorRegistry()
    return AuditLog(settings, PROCESS, AuditMetrics(registry, "pool")), registry


def metric(registry: CollectorRegistry, name: str) -> float:
    """Value of `prfaas_pool_audit_NAME`."""
    value = registry.get_sample_value(f"prfaas_pool_audit_{name}")
    assert value is not None
    return value


def limit_files(num_bytes: int) -> None:
    """Let the kernel write files up to this size, as a full disk does: in part, then not at all."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))


def _main(folder: Path, mode: str) -> None:
    log, _ = audit_log(AuditSettings(folder, folder, rotate_bytes=100_000))
    if mode == TORN:
        # The process dies when the kernel has taken a part of a batch.
        os.ftruncate = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        limit_files((folder / f"{PROCESS}.000001.jsonl").stat().st_size + 1010)
    print("ready", flush=True)
    number, pause = 0, threading.Event()
    while True:
        log.write({"kind": "movement", "bytes": number, "filler": "x" * 100})
        number += 1
        if number % 100 == 0:
            pause.wait(0.001)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2])
