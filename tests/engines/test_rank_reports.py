"""Reports of ranks in shared memory: real files, locks and processes. Needs vLLM to import."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prfaas.engines.canonical.vllm_parts import KernelPages
from prfaas.engines.shared_memory import (
    SHARED_MEMORY,
    claim,
    leave_report,
    region_path,
    remove_abandoned,
    report_path,
    take_reports,
)
from prfaas.errors import ConfigError
from tests.engines.vllm_modules import needing_vllm

pytestmark = pytest.mark.timeout(180)
RANK = """
import sys, time
from pathlib import Path
from prfaas.engines.shared_memory import claim, leave_report
name, rank, directory = sys.argv[1:]
claim(name, Path(directory))
leave_report(name, int(rank), b"of another process", Path(directory))
print("left", flush=True)
time.sleep(600)
"""
WHOLE, SPLIT = KernelPages(1, "HNC"), KernelPages(4, "HNC")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in real shared memory, of this test alone."""
    path = SHARED_MEMORY / f"prfaas-test-{secrets.token_hex(6)}"
    path.mkdir(mode=0o700)
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


@pytest.fixture
def ranks() -> Any:
    return needing_vllm("prfaas.engines.canonical.vllm_ranks")


def report(ranks: Any, file: Path, pages: KernelPages = WHOLE) -> bytes:
    made = ranks.RankReport(ranks.memory_of(file.stat()), {"layer": pages})
    return msgspec.json.encode(made)


def files(folder: Path, number: int) -> list[Path]:
    """Files as regions of an engine."""
    paths = [region_path(f"e{n}", folder) for n in range(number)]
    for path in paths:
        path.write_bytes(bytes(4096))
    return paths


def test_the_take_reports_living_ranks_are_read(folder: Path) -> None:
    held = [leave_report("e", rank, b"%d" % rank, folder) for rank in (0, 1)]
    assert take_reports("e", 3, folder) == {0: b"0", 1: b"1"}
    assert list(folder.iterdir()) == []
    for descriptor in held:
        os.close(descriptor)


def test_a_report_goes_with_its_process_and_then_with_the_region(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, "e", "0", str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "left\n"
    assert remove_abandoned(folder) == []
    process.kill()
    process.communicate()
    assert report_path("e", 0, folder).exists()
    assert take_reports("e", 1, folder) == {}
    os.close(claim("other", folder))
    assert report_path("e", 0, folder) in remove_abandoned(folder)


def test_a_shorter_report_replaces_a_longer_one(folder: Path) -> None:
    first = leave_report("e", 0, b"a long report", folder)
    os.close(first)
    held = leave_report("e", 0, b"short", folder)
    assert take_reports("e", 1, folder) == {0: b"short"}
    os.close(held)


def test_ranks_with_one_memory_have_the_pages_that_they_report(folder: Path, ranks: Any) -> None:
    [file] = files(folder, 1)
    found = {rank: report(ranks, file, SPLIT) for rank in (0, 1)}
    assert ranks.pages_of_ranks(found, 2, ranks.memory_of(file.stat())) == {"layer": SPLIT}


def test_a_rank_with_another_file_is_refused(folder: Path, ranks: Any) -> None:
    """As where two containers of a host have a `/dev/shm` each."""
    own, other = files(folder, 2)
    found = {0: report(ranks, own), 1: report(ranks, other)}
    with pytest.raises(ConfigError, match=r"rank 1 has file .* as host memory, and the scheduler"):
        ranks.pages_of_ranks(found, 2, ranks.memory_of(own.stat()))


def test_a_file_of_the_same_number_on_another_host_is_another_file(
    folder: Path, ranks: Any
) -> None:
    [file] = files(folder, 1)
    own = ranks.memory_of(file.stat())
    moved = ranks.Memory("elsewhere", "another boot", own.device, own.inode)
    far = msgspec.json.encode(ranks.RankReport(moved, {}))
    with pytest.raises(ConfigError, match="at elsewhere as host memory"):
        ranks.pages_of_ranks({0: far}, 1, own)


def test_a_rank_that_left_no_report_is_refused(folder: Path, ranks: Any) -> None:
    [file] = files(folder, 1)
    own = ranks.memory_of(file.stat())
    with pytest.raises(ConfigError, match=r"rank 1 of 4 is not in .* \(3 are missing\): the ranks"):
        ranks.pages_of_ranks({0: report(ranks, file)}, 4, own)


def test_ranks_whose_backends_split_pages_differently_are_refused(folder: Path, ranks: Any) -> None:
    [file] = files(folder, 1)
    found = {0: report(ranks, file), 1: report(ranks, file, SPLIT)}
    with pytest.raises(ConfigError, match="layer layer has pages of 4 kernel blocks in the order"):
        ranks.pages_of_ranks(found, 2, ranks.memory_of(file.stat()))
