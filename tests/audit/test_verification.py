"""Verification of audit logs: what is damaged is found, what is not is not."""

from __future__ import annotations

import tempfile
from itertools import combinations
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prfaas.audit.chain_file import ChainFile, file_path
from prfaas.audit.keys import public_text
from prfaas.audit.reading import logs_of
from prfaas.core.audit.chain import parse_line
from prfaas.core.audit.records import TORN, CheckpointCause
from prfaas.errors import ConfigError

from . import damaged_logs
from .damaged_logs import DAMAGES, LOG, STEPS, Damage, make_log, verified

pytestmark = pytest.mark.timeout(300)


@settings(max_examples=80, deadline=None)
@given(STEPS)
def test_a_log_of_any_history_is_intact(steps: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_log(Path(folder), steps)
        report = verified(Path(folder))

    assert report.is_intact, report.findings
    assert report.unsigned_lines == 0
    assert len([note for note in report.notes if TORN in note]) == steps.count("crash")


@settings(max_examples=150, deadline=None)
@given(STEPS, DAMAGES)
def test_any_single_damage_of_a_signed_log_is_found(steps: list[str], damage: Damage) -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_log(Path(folder), steps)
        assume(damage.apply(Path(folder)))
        try:
            report = verified(Path(folder))
        except ConfigError:  # The only file is gone.
            return

    assert not report.is_intact, damage


@settings(max_examples=150, deadline=None)
@given(STEPS, st.integers(0, 10**6))
def test_a_cut_at_any_byte_before_the_last_checkpoint_is_found(steps: list[str], at: int) -> None:
    """All files after the cut are gone too, as if the log had ended there."""
    with tempfile.TemporaryDirectory() as folder:
        make_log(Path(folder), steps)
        files = list(logs_of(Path(folder))[LOG].values())
        place = at % sum(path.stat().st_size for path in files)
        for path in files:
            size = path.stat().st_size
            path.write_bytes(path.read_bytes()[: max(0, place)])
            place -= size
            if place < -size:
                path.unlink()
        report = verified(Path(folder))

    assert not report.is_intact


@settings(max_examples=100, deadline=None)
@given(STEPS, st.integers(1, 10**6))
def test_lines_after_the_last_checkpoint_are_missed_only_if_their_number_is_unknown(
    steps: list[str], num: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_log(Path(folder), [*steps, "checkpoint", *["record"] * (num % 9 + 1)], is_clean=False)
        whole = verified(Path(folder))
        path = list(logs_of(Path(folder))[LOG].values())[-1]
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[: -whole.unsigned_lines]))
        alone = verified(Path(folder))
        counted = verified(Path(folder), expected_lines=whole.num_lines)

    assert whole.unsigned_lines == num % 9 + 1
    assert alone.is_intact
    assert [text for text in counted.findings if "cut off" in text]


def test_a_log_signed_by_another_key_is_found(tmp_path: Path) -> None:
    make_log(tmp_path, ["record"])
    other = public_text(Ed25519PrivateKey.generate())

    report = verified(tmp_path, public_key=other)

    assert report.num_checkpoints == 0
    assert "signature" in report.findings[0]


def test_files_that_keep_removes_are_no_damage_and_one_more_is(tmp_path: Path) -> None:
    file = ChainFile(damaged_logs.settings(tmp_path, keep=2), LOG)
    for _ in range(4):
        file.rotate()
    file.checkpoint(CheckpointCause.END)
    file.close()
    kept = logs_of(tmp_path)[LOG]
    whole = verified(tmp_path)
    kept[4].unlink()
    short = verified(tmp_path)

    assert list(kept) == [4, 5]
    assert whole.is_intact
    assert whole.notes == ["files 1 to 3 were removed, as the log records"]
    assert short.findings == ["file 4 of pd-pool is missing, and no signed line records it"]


def test_a_cut_while_the_process_was_down_is_recorded_by_its_next_start(tmp_path: Path) -> None:
    make_log(tmp_path, ["record", "checkpoint", "batch"])
    path = file_path(tmp_path, LOG, 1)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:5]))
    make_log(tmp_path, ["record"])

    (finding,) = verified(tmp_path).findings

    assert "4 lines were missing before it" in finding


def test_a_line_that_lacks_only_its_newline_is_kept(tmp_path: Path) -> None:
    make_log(tmp_path, ["record"], is_clean=False)
    path = file_path(tmp_path, LOG, 1)
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    make_log(tmp_path, ["record"])

    report = verified(tmp_path)

    assert report.is_intact
    assert not [note for note in report.notes if TORN in note]


def test_a_torn_line_that_is_gone_is_missed(tmp_path: Path) -> None:
    make_log(tmp_path, ["record", "crash"])
    path = file_path(tmp_path, LOG, 1)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4] + lines[5:]))

    assert [text for text in verified(tmp_path).findings if "is missing before it" in text]


def test_a_file_whose_first_line_was_torn_is_begun_anew(tmp_path: Path) -> None:
    make_log(tmp_path, ["record"])
    file_path(tmp_path, LOG, 2).write_bytes(b'{"n":')
    make_log(tmp_path, ["record"])

    assert verified(tmp_path).is_intact
    assert list(logs_of(tmp_path)[LOG]) == [1, 2]


def test_a_log_that_cannot_be_read_is_not_continued(tmp_path: Path) -> None:
    file_path(tmp_path, LOG, 1).write_bytes(b"what is this\n")

    with pytest.raises(ConfigError, match="cannot be continued"):
        make_log(tmp_path, [])


def test_two_processes_do_not_write_one_log(tmp_path: Path) -> None:
    file = ChainFile(damaged_logs.settings(tmp_path), LOG)

    with pytest.raises(ConfigError, match="another process writes"):
        make_log(tmp_path, [])
    file.close()


def test_a_key_that_others_can_open_is_refused(tmp_path: Path) -> None:
    make_log(tmp_path, [])
    (tmp_path / f"{LOG}.key").chmod(0o640)

    with pytest.raises(ConfigError, match="chmod 600"):
        make_log(tmp_path, [])


def test_a_log_is_not_continued_with_another_key(tmp_path: Path) -> None:
    make_log(tmp_path, [])
    (tmp_path / f"{LOG}.key").unlink()

    with pytest.raises(ConfigError, match="one log has one key"):
        make_log(tmp_path, [])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b'{"n":1},"hash":"' + b"0" * 64 + b'"}',
        b'{"n":' + b"[" * 9000 + b',"hash":"' + b"0" * 64 + b'"}',
        b'{"n":1,"a":"' + b"x" * (16 << 10) + b'","hash":"' + b"0" * 64 + b'"}',
    ],
)
def test_what_is_no_line_is_refused_without_an_exception(data: bytes) -> None:
    assert parse_line(data) is None


def test_fields_of_wrong_types_are_no_exception(tmp_path: Path) -> None:
    """A line that follows the others can be written without the key."""
    make_log(tmp_path, [], is_clean=False)
    file = ChainFile(damaged_logs.settings(tmp_path), LOG)
    for kind in ("file", "start", "gap", "removed", "checkpoint"):
        odd: dict[str, object] = {
            "kind": kind,
            "previous": "x",
            "lost": [],
            "file": {},
            "cut_lines": "y",
            "why": 1,
        }
        file.append([(0, odd)])
    file.close()

    assert not verified(tmp_path).is_intact


@settings(max_examples=80, deadline=None)
@given(STEPS, DAMAGES, st.integers(1, 5))
def test_damage_before_the_last_checkpoint_is_found_while_the_log_is_in_use(
    steps: list[str], damage: Damage, num_after: int
) -> None:
    """The lines after the checkpoint stay as they are."""
    assume(damage.kind not in ("unlink", "rechain"))
    steps = [step for step in steps if step != "rotate"]
    with tempfile.TemporaryDirectory() as folder:
        path = file_path(Path(folder), LOG, 1)
        make_log(Path(folder), [*steps, "checkpoint"], is_clean=False)
        signed = path.stat().st_size
        make_log(Path(folder), [], is_clean=False)
        file = ChainFile(damaged_logs.settings(Path(folder)), LOG)
        for _ in range(num_after):
            file.append([(0, {"kind": "movement"})])
        file.close()
        content = path.read_bytes()
        path.write_bytes(content[:signed])
        assume(damage.apply(Path(folder)))
        path.write_bytes(path.read_bytes() + content[signed:])
        report = verified(Path(folder))

    assert not report.is_intact, damage


def test_every_drop_swap_cut_and_changed_byte_of_one_log_is_found(tmp_path: Path) -> None:
    """Exhaustive, over a log with a crash, a restart, two files and checkpoints."""
    make_log(tmp_path, ["record", "crash", "batch", "rotate", "restart", "checkpoint", "record"])
    paths = list(logs_of(tmp_path)[LOG].values())
    missed, num_changes = [], 0
    for path in paths:
        content = path.read_bytes()
        lines = content.splitlines(keepends=True)
        numbers = range(len(lines))
        changes = {f"drop {n}": b"".join(lines[:n] + lines[n + 1 :]) for n in numbers}
        changes |= {f"keep {n} lines": b"".join(lines[:n]) for n in numbers}
        changes |= {f"cut at {at}": content[:at] for at in range(0, len(content), 7)}
        for one, other in combinations(numbers, 2):
            swapped = list(lines)
            swapped[one], swapped[other] = lines[other], lines[one]
            changes[f"swap {one} {other}"] = b"".join(swapped)
        for at in range(0, len(content), 3):
            flipped = bytes([content[at] ^ 1])
            changes[f"byte {at}"] = content[:at] + flipped + content[at + 1 :]
        for name, changed in changes.items():
            path.write_bytes(changed)
            missed += [(path.name, name)] if verified(tmp_path).is_intact else []
        path.write_bytes(content)
        num_changes += len(changes)

    assert missed == []
    assert num_changes > 2000
    assert verified(tmp_path).is_intact
