"""Sweeps: independent jobs, in processes of this machine or on a Ray cluster.

The result of a job depends on its arguments alone, never on the place where it ran. If a worker is
lost (out of memory, killed, its machine gone), its jobs run again on another one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any, Generic, TypeVar

from prfaas import __version__
from prfaas.errors import ConfigError, PrfaasError
from prfaas.extras import require

CONNECT_TIMEOUT_S = 5.0
AUTO = "auto"
"""Address of the cluster that runs on this machine."""


@contextlib.contextmanager
def ray_cluster(address: str, namespace: str | None = None) -> Iterator[None]:
    """Connect to a Ray cluster while the context is open; ConfigError if ray is not installed, or
    no cluster answers.

    Args:
        address: HOST:PORT of the head's GCS, or "auto".
        namespace: Of named actors; None is a namespace of this process alone.
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
    require("Ray's cluster", "ray")


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


Made = TypeVar("Made")
RUNS_MAX = 3
"""Runs of a job whose workers were lost. A job that exhausts memory ends every worker it gets."""
NAMES_MAX = 3
"""Jobs that an error names."""
_BACKEND = "prfaas-ray"


class JobError(PrfaasError):
    """A job of a sweep raised an exception, or lost every worker that ran it."""


@dataclass(frozen=True, slots=True)
class SweepJob(Generic[Made]):
    """One job."""

    name: str
    """Settings of the job in words, for errors."""
    work: Callable[[], Made]
    """A function without arguments; can be pickled, and so can its result."""


@dataclass(frozen=True, slots=True)
class SweepPlace:
    """Place of a sweep."""

    num_workers: int | None = None
    """Jobs at a time; None is one per core. 1 without Ray is this process itself."""
    ray: str | None = None
    """Address of a Ray cluster; None runs processes of this machine."""


@dataclass(frozen=True, slots=True)
class _Fault:
    """An exception of a job. It is returned, since not every exception can be pickled."""

    text: str
    is_mistake: bool


def run_jobs(
    jobs: Sequence[SweepJob[Made]], place: SweepPlace | None = None
) -> Iterator[tuple[int, Made]]:
    """Run all jobs and yield index and result of each as it ends.

    Raises:
        ConfigError: A job raised it, or there is no such Ray cluster.
        JobError: A job raised another exception, or lost `RUNS_MAX` workers.
    """
    # Imports take 0.1 s.
    from joblib import Parallel, delayed

    left, losses = dict(enumerate(jobs)), Counter[int]()
    with _workers(place or SweepPlace()) as lost:
        while left:
            started: set[int] = set()

            def todo(started: set[int] = started) -> Iterator[Any]:
                for index, job in list(left.items()):
                    started.add(index)
                    yield delayed(_run)(index, job.work, __version__)

            # One job a message, and no more than run: what a lost worker had is known.
            parallel = Parallel(
                return_as="generator_unordered", batch_size=1, pre_dispatch="n_jobs"
            )
            with _without_ctrl_c():
                outputs = parallel(todo())
            try:
                for index, found in outputs:
                    if isinstance(found, _Fault):
                        raise _error(left[index], found)
                    del left[index]
                    started.discard(index)
                    yield index, found
            except lost as error:
                losses.update(started)
                given_up = [i for i in sorted(started) if losses[i] >= RUNS_MAX]
                if given_up:
                    raise _all_lost([left[i] for i in given_up], error) from error
            finally:
                with warnings.catch_warnings():  # joblib's, that jobs are cancelled
                    warnings.simplefilter("ignore", UserWarning)
                    outputs.close()


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Block SIGINT; processes and threads that start meanwhile keep it blocked.

    Ctrl-C goes to all processes of a terminal. This one ends the workers. The resource tracker is
    started before: Python 3.11 unblocks SIGINT when it starts, for the workers after it as well.
    """
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(index: int, work: Callable[[], Any], version: str) -> tuple[int, Any]:
    if version != __version__:
        text = f"a worker has prfaas {__version__}, and this is {version}; install the same one"
        return index, _Fault(text, is_mistake=True)
    try:
        return index, work()
    except ConfigError as error:
        return index, _Fault(str(error), is_mistake=True)
    except Exception as error:
        text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        return index, _Fault(text, is_mistake=False)


def _error(job: SweepJob[Any], fault: _Fault) -> PrfaasError:
    if fault.is_mistake:
        return ConfigError(f"{job.name}: {fault.text}")
    return JobError(f"the job {job.name} failed: {fault.text}")


def _all_lost(jobs: Sequence[SweepJob[Any]], error: Exception) -> JobError:
    names = "; ".join(job.name for job in jobs[:NAMES_MAX])
    rest = f" and {len(jobs) - NAMES_MAX} more" if len(jobs) > NAMES_MAX else ""
    cause = (str(error).splitlines() or [type(error).__name__])[0]
    return JobError(
        f"{RUNS_MAX} workers were lost that ran {names}{rest}: {cause} Out of memory is the usual "
        "cause: run fewer at a time with --jobs"
    )


@contextlib.contextmanager
def _workers(place: SweepPlace) -> Iterator[tuple[type[Exception], ...]]:
    """Configure joblib; the context has the exceptions of a lost worker."""
    from joblib import parallel_config
    from joblib.externals.loky.process_executor import BrokenProcessPool

    if place.ray is None:
        # Large arguments are copied: files in /dev/shm would outlive a killed sweep.
        with parallel_config("loky", n_jobs=place.num_workers or -1, max_nbytes=None):
            yield (BrokenProcessPool,)
        return
    with (
        # Ray writes about lost workers to standard output, where `--json` belongs.
        contextlib.redirect_stdout(sys.stderr),
        ray_cluster(place.ray),
        parallel_config(_ray_backend(), n_jobs=place.num_workers or -1),
    ):
        yield _ray_losses()


def _ray_backend() -> str:
    from joblib import register_parallel_backend
    from ray.util.joblib.ray_backend import RayBackend

    class Backend(RayBackend):  # type: ignore[misc]
        # Of multiprocessing's pools, which it inherits; Ray's pool has no such limit.
        supports_return_generator = True

    register_parallel_backend(_BACKEND, Backend)
    return _BACKEND


def _ray_losses() -> tuple[type[Exception], ...]:
    from ray import exceptions

    return exceptions.RayActorError, exceptions.WorkerCrashedError, exceptions.ObjectLostError
