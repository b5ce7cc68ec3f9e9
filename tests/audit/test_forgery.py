"""Attacks on an audit log without its key: no edit of a signed line stays undetected."""

from __future__ import annotations

import shutil
import tempfile
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import example, given, settings

from prfaas.audit.chain_file import ChainFile, file_path
from prfaas.audit.reading import logs_of
from prfaas.core.audit.chain import parse_line
from prfaas.core.audit.records import CheckpointCause, RecordKind
from prfaas.errors import ConfigError

from . import damaged_logs
from .damaged_logs import LOG, make_log, verified
from .forged_logs import ATTACKS, HISTORIES, Attack, history, lines_of, restart

pytestmark = pytest.mark.timeout(300)

REMOVE = [
    Attack("delete_first", 5, 0, "removed"),
    Attack("append", 0, 0, "removed"),
]
"""Five of six signed files, and one line that `keep` might have written."""
ROLL_BACK = [
    Attack("delete_last", 1, 0, "movement"),
    Attack("newest_head", 0, 0, "movement"),
    Attack("append", 0, 19, "movement"),
]
"""All after a file, with a head that fits and unsigned lines in place of the signed ones."""
REPLACE = [
    Attack("truncate", 0, 100, "movement"),
    Attack("append", 0, 29, "movement"),
]


def six_files(folder: Path) -> None:
    """A log of six files that nothing was removed from."""
    make_log(folder, ["batch", "rotate"] * 5 + ["batch"])


def through(lines: list[bytes], number: int) -> list[bytes]:
    """Lines up to a number."""
    parsed = [line for line in map(parse_line, lines) if line is not None]
    return lines[: sum(line.number <= number for line in parsed)]


@settings(max_examples=120, deadline=None)
@given(HISTORIES, ATTACKS)
@example(["rotate"] * 4, [*REMOVE, Attack("restart", 0, 0, "movement")])
@example(["rotate"] * 4, [*ROLL_BACK, Attack("restart", 0, 0, "movement")])
@example(["record"], [*REPLACE, Attack("restart", 0, 0, "movement")])
def test_no_edit_of_a_signed_log_stays_undetected(steps: list[str], attacks: list[Attack]) -> None:
    """With what was kept elsewhere: the key, the number of lines, and a copy of the head."""
    with tempfile.TemporaryDirectory() as local:
        folder, snapshots, saved = Path(local, "log"), Path(local, "old"), Path(local, "saved.head")
        history(folder, steps, snapshots)
        key = (folder / f"{LOG}.pub").read_text()
        shutil.copy(folder / f"{LOG}.head", saved)
        before = lines_of(folder)
        written = {line for old in snapshots.iterdir() for line in lines_of(old)} | set(before)
        last = parse_line(before[-1])
        assert last is not None
        try:
            for attack in attacks:
                attack.apply(folder, snapshots)
            report = verified(folder, public_key=key, expected_lines=last.number, known_head=saved)
        except ConfigError:  # No file is left, or none that the process continues.
            return
        after = lines_of(folder)

    if report.is_intact:
        signed = through(after, last.number)
        assert signed[-len(before) :] == before, "a signed line is not as it was"
        assert set(signed) <= written, "a line is signed that the process did not write"


@settings(max_examples=120, deadline=None)
@given(HISTORIES, ATTACKS)
@example(["rotate"] * 4, REMOVE)
@example(["rotate"] * 4, ROLL_BACK)
def test_before_the_next_start_the_number_of_lines_is_enough(
    steps: list[str], attacks: list[Attack]
) -> None:
    with tempfile.TemporaryDirectory() as local:
        folder, snapshots = Path(local, "log"), Path(local, "old")
        history(folder, steps, snapshots)
        key, before = (folder / f"{LOG}.pub").read_text(), lines_of(folder)
        last = parse_line(before[-1])
        assert last is not None
        try:
            for attack in attacks:
                if attack.kind != "restart":
                    attack.apply(folder, snapshots)
            report = verified(folder, public_key=key, expected_lines=last.number)
        except ConfigError:
            return
        after = lines_of(folder)

    assert not report.is_intact or through(after, last.number)[-len(before) :] == before


def test_any_files_that_are_deleted_are_missed(tmp_path: Path) -> None:
    """Every subset, alone and with a forged line that says so, before and after a start."""
    six_files(tmp_path / "log")
    files = list(logs_of(tmp_path / "log")[LOG])
    subsets = [set(gone) for n in range(1, 6) for gone in combinations(files, n)]
    missed = []
    for number, gone in enumerate(subsets):
        for is_forged in (False, True):
            folder = tmp_path / f"{number}{is_forged}"
            shutil.copytree(tmp_path / "log", folder)
            for file in gone:
                file_path(folder, LOG, file).unlink()
            if is_forged:
                Attack("append", 0, 0, "removed").apply(folder, tmp_path)
            missed += [(gone, is_forged, "before")] if verified(folder).is_intact else []
            restart(folder)
            missed += [(gone, is_forged, "after")] if verified(folder).is_intact else []

    assert len(subsets) == 62
    assert missed == []


def test_a_removal_counts_only_with_the_checkpoint_that_follows_it(tmp_path: Path) -> None:
    """As the process writes it: files go once the line is signed."""
    file = ChainFile(damaged_logs.settings(tmp_path, keep=2), LOG)
    for _ in range(4):
        file.rotate()
    file.append(
        [(0, {"kind": RecordKind.REMOVED, "file": 4, "files": 1})]
    )  # Killed before it signs.
    file.close()
    restart(tmp_path)
    whole = verified(tmp_path)
    file_path(tmp_path, LOG, 4).unlink()

    assert whole.is_intact
    assert verified(tmp_path).findings == [
        f"file 4 of {LOG} is missing, and no signed line records it"
    ]


@pytest.mark.parametrize("record", ["movement", "removed", "gap", "start", "end", "file"])
def test_lines_that_are_added_while_no_process_runs_are_found(tmp_path: Path, record: str) -> None:
    make_log(tmp_path, ["record"])
    Attack("append", 0, 1, record).apply(tmp_path, tmp_path)
    Attack("append", 0, 0, "movement").apply(tmp_path, tmp_path)
    before = verified(tmp_path)
    restart(tmp_path)

    assert not before.is_intact
    assert not verified(tmp_path).is_intact


def test_signed_lines_that_were_replaced_are_recorded_by_the_next_start(tmp_path: Path) -> None:
    """As many lines as before, so that the number alone does not show it."""
    make_log(tmp_path, ["checkpoint", "batch", "checkpoint"])
    path = file_path(tmp_path, LOG, 1)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:4]))
    Attack("append", 0, 9, "movement").apply(tmp_path, tmp_path)
    restart(tmp_path)

    (finding,) = verified(tmp_path).findings

    assert "the last signed line was not in the log" in finding


def test_a_head_that_was_deleted_is_recorded_by_the_next_start(tmp_path: Path) -> None:
    make_log(tmp_path, ["record", "checkpoint", "record"])
    (tmp_path / f"{LOG}.head").unlink()
    restart(tmp_path)

    assert not verified(tmp_path).is_intact


def test_a_process_killed_before_its_first_head_is_no_damage(tmp_path: Path) -> None:
    ChainFile(damaged_logs.settings(tmp_path), LOG).close()
    (tmp_path / f"{LOG}.head").unlink()
    restart(tmp_path)

    assert verified(tmp_path).is_intact


def test_a_copy_of_the_head_shows_a_log_that_was_cut_back_and_continued(tmp_path: Path) -> None:
    folder, saved = tmp_path / "log", tmp_path / "saved.head"
    make_log(folder, ["record", "checkpoint", "batch", "checkpoint"], is_clean=False)
    num_lines = verified(folder).num_lines
    shutil.copy(folder / f"{LOG}.head", saved)
    path = file_path(folder, LOG, 1)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:5]))
    Attack("newest_head", 0, 0, "movement").apply(folder, tmp_path)
    for _ in range(3):
        restart(folder)

    assert verified(folder, expected_lines=num_lines).is_intact
    (finding,) = verified(folder, known_head=saved).findings
    assert "is no checkpoint of this log" in finding


def test_an_unsigned_gap_is_no_lost_record(tmp_path: Path) -> None:
    make_log(tmp_path, ["record", "checkpoint"], is_clean=False)
    Attack("append", 0, 0, "gap").apply(tmp_path, tmp_path)

    assert verified(tmp_path).lost_records == 0


def test_a_start_that_is_not_signed_explains_no_broken_line(tmp_path: Path) -> None:
    make_log(tmp_path, ["record", "checkpoint"], is_clean=False)
    path = file_path(tmp_path, LOG, 1)
    path.write_bytes(path.read_bytes() + b"junk\n")
    file = ChainFile(damaged_logs.settings(tmp_path), LOG)  # It records the junk, and signs.
    file.close()
    signed = verified(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    Attack("newest_head", 0, 0, "movement").apply(tmp_path, tmp_path)
    unsigned = verified(tmp_path)

    assert signed.is_intact
    assert ["that record is not signed" in text for text in unsigned.findings] == [True]


def test_lines_are_expected_to_be_signed(tmp_path: Path) -> None:
    """A number is met neither by lines that were padded nor by those that nobody signed."""
    make_log(tmp_path, ["record", "checkpoint", "batch"], is_clean=False)
    report = verified(tmp_path)

    assert report.is_intact
    assert verified(tmp_path, expected_lines=report.signed_lines).is_intact
    (finding,) = verified(tmp_path, expected_lines=report.num_lines).findings
    assert "only 5 are signed" in finding
    file = ChainFile(damaged_logs.settings(tmp_path), LOG)
    file.checkpoint(CheckpointCause.END)
    file.close()
    assert verified(tmp_path, expected_lines=report.num_lines).is_intact
