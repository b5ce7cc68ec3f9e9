"""Fixtures and hooks of all tests."""

import gc
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web_app
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from prfaas.wire.identity import make_authority, make_identity
from tests.mooncake.fixtures import mooncake
from tests.s3.fixtures import bucket, s3_port

__all__ = ["bucket", "mooncake", "s3_port"]

# A slow example on a busy machine is no finding; the timeout of every test stands.
settings.register_profile("prfaas", deadline=None)
settings.load_profile("prfaas")

LIVE = "tests/live/"
MEMORY_MIB_MAX = 3072
"""Peak resident memory of a process that runs tests. Torch, transformers and vLLM's configuration
take 1,000 MiB of the 2,100 that one of two workers reaches at the end of the whole suite."""

GARBAGE_MIB_MAX = 256
"""Growth of the resident memory after which a process that runs tests looks for garbage."""
_after_collection_mib = [0]


@pytest.fixture(scope="session")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the parts of a deployment, and of a stranger that its authority knows."""
    directory = tmp_path_factory.mktemp("identities")
    make_authority(directory)
    for name in ("gateway", "prfaas-pool", "pd-pool", "stranger"):
        make_identity(directory, name)
    return directory


@pytest.fixture(autouse=True)
def _closed_servers_are_freed() -> Iterator[None]:
    """aiohttp caches the handlers of the last 1,024 routes in a module, and with them whole
    gateways of 13 MiB each."""
    yield
    web_app._cached_build_middleware.cache_clear()


@pytest.fixture(autouse=True)
def _garbage_is_freed() -> Iterator[None]:
    """Beside the million objects of Torch and vLLM, the interpreter collects old cycles so rarely
    that simulations and deployments of a hundred tests pile up to gigabytes."""
    yield
    if _resident_mib() > _after_collection_mib[0] + GARBAGE_MIB_MAX:
        gc.collect()
        _after_collection_mib[0] = _resident_mib()


def _resident_mib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() >> 20


@pytest.fixture(scope="session", autouse=True)
def _memory_is_bounded() -> Iterator[None]:
    yield
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    assert peak_mib <= MEMORY_MIB_MAX, (
        f"the tests of one process took {peak_mib} MiB of memory, limit {MEMORY_MIB_MAX} MiB: "
        "something keeps what tests leave behind"
    )


class WholeFiles(LoadScopeScheduling):  # type: ignore[misc]
    """Gives each worker of a parallel run whole files, in the order of collection.

    Tests that share a deployment of real engines go to one worker, so that it is started once.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::", 1)[0]
        return LIVE if path.startswith(LIVE) else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> WholeFiles:
    return WholeFiles(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave whole matrices out unless `-m` names them. Real engines first: what takes longest may
    not begin last."""
    if "nightly" not in config.getoption("markexpr"):
        late = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=late)
        items[:] = [item for item in items if item not in late]
    items.sort(key=lambda item: item.get_closest_marker("engine") is None)
