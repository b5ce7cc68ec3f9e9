"""Attacks on a log by whoever can write its folder and has no key."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from prfaas.audit.chain_file import ChainFile, file_path, logs_in
from prfaas.core.audit.chain import GENESIS, digest_of, make_line, parse_line
from prfaas.core.audit.records import TORN, CheckpointCause, RecordKind

from .damaged_logs import LOG, settings

KEEP = 3
RECORDS: dict[str, dict[str, object]] = {
    "movement": {"kind": RecordKind.MOVEMENT, "bytes": 666},
    "removed": {"kind": RecordKind.REMOVED, "file": 5, "files": 5},
    "gap": {"kind": RecordKind.GAP, "lost": 4},
    "start": {"kind": RecordKind.START, "after": "end", "key": "0" * 64},
    "torn": {"kind": RecordKind.START, "after": "crash", "note": TORN, "torn_sha256": ""},
    "end": {"kind": RecordKind.CHECKPOINT, "why": CheckpointCause.END, "lines": 1},
    "rotation": {"kind": RecordKind.CHECKPOINT, "why": CheckpointCause.ROTATION, "lines": 1},
    "file": {"kind": RecordKind.FILE, "format": 1, "log": LOG, "file": 1, "previous": "0" * 64},
}
HISTORIES = st.lists(
    st.sampled_from(["record", "batch", "checkpoint", "rotate", "rotate", "restart", "crash"]),
    min_size=1,
    max_size=12,
)
NUMBERS = st.integers(0, 10**4)


def history(folder: Path, steps: list[str], snapshots: Path) -> None:
    """Write a log of which old files are removed, with a copy of the folder after each step."""
    file = ChainFile(settings(folder, keep=KEEP), LOG, lambda: 10**18)
    for number, step in enumerate(steps):
        record = {"kind": RecordKind.MOVEMENT, "bytes": number}
        match step:
            case "record" | "batch":
                file.append([(10**18, record)] * (1 if step == "record" else 3))
            case "checkpoint":
                file.checkpoint(CheckpointCause.LINES)
            case "rotate":
                file.rotate()
            case "restart" | "crash":
                if step == "restart":
                    file.checkpoint(CheckpointCause.END)
                file.close()
                file = ChainFile(settings(folder, keep=KEEP), LOG, lambda: 10**18)
        shutil.copytree(folder, snapshots / str(number))
    file.checkpoint(CheckpointCause.END)
    file.close()


def restart(folder: Path) -> None:
    """The process that has the key writes again, and ends in order."""
    file = ChainFile(settings(folder), LOG, lambda: 10**18)
    file.append([(10**18, {"kind": RecordKind.MOVEMENT, "bytes": 1})])
    file.checkpoint(CheckpointCause.END)
    file.close()


def lines_of(folder: Path) -> list[bytes]:
    """Lines in the order of files and numbers, broken ones included."""
    files = logs_in(folder).get(LOG, {}).values()
    return [line for path in files for line in path.read_bytes().splitlines()]


@dataclass(frozen=True)
class Attack:
    """One step of an attack.

    Attributes:
        kind: Name of a method.
        one: Selects a file, or a snapshot.
        other: Selects a line, a byte, or a second file.
        record: Name of what is forged.
    """

    kind: str
    one: int
    other: int
    record: str

    def apply(self, folder: Path, snapshots: Path) -> None:
        """Change the folder; no effect where there is nothing to change."""
        files = logs_in(folder).get(LOG, {})
        if files:
            getattr(self, f"_{self.kind}")(folder, list(files.values()), snapshots)

    def _pick(self, paths: list[Path]) -> Path:
        return paths[self.one % len(paths)]

    def _delete(self, _: Path, paths: list[Path], __: Path) -> None:
        self._pick(paths).unlink()

    def _delete_first(self, _: Path, paths: list[Path], __: Path) -> None:
        for path in paths[: self.one % len(paths)]:
            path.unlink()

    def _delete_last(self, _: Path, paths: list[Path], __: Path) -> None:
        for path in paths[1 + self.one % len(paths) :]:
            path.unlink()

    def _copy_back(self, folder: Path, _: list[Path], snapshots: Path) -> None:
        """An old state of one file, or of the head."""
        old = sorted(snapshots.glob(f"*/{LOG}.*[0-9].jsonl")) + sorted(snapshots.glob("*/*.head"))
        source = old[self.other % len(old)]
        shutil.copy(source, folder / source.name)

    def _copy_all_back(self, folder: Path, paths: list[Path], snapshots: Path) -> None:
        for path in paths:
            path.unlink()
        old = sorted(snapshots.iterdir())[self.one % len(list(snapshots.iterdir()))]
        shutil.copytree(old, folder, dirs_exist_ok=True)

    def _rename(self, _: Path, paths: list[Path], __: Path) -> None:
        one, other = self._pick(paths), paths[self.other % len(paths)]
        swapped = one.read_bytes(), other.read_bytes()
        other.write_bytes(swapped[0])
        one.write_bytes(swapped[1])

    def _move(self, folder: Path, paths: list[Path], _: Path) -> None:
        self._pick(paths).rename(file_path(folder, LOG, 1 + self.other % 8))

    def _lines(self, path: Path) -> tuple[list[bytes], int]:
        lines = path.read_bytes().splitlines(keepends=True)
        return lines, self.other % max(1, len(lines))

    def _edit(self, _: Path, paths: list[Path], __: Path) -> None:
        """Another number in a record."""
        path = self._pick(paths)
        lines, at = self._lines(path)
        field = re.compile(rb'"(bytes|file|files|lost|lines)":(\d+)')
        lines[at : at + 1] = [field.sub(rb'"\1":9\2', line) for line in lines[at : at + 1]]
        path.write_bytes(b"".join(lines))

    def _drop(self, _: Path, paths: list[Path], __: Path) -> None:
        path = self._pick(paths)
        lines, at = self._lines(path)
        path.write_bytes(b"".join(lines[:at] + lines[at + 1 :]))

    def _swap(self, _: Path, paths: list[Path], __: Path) -> None:
        path = self._pick(paths)
        lines, at = self._lines(path)
        path.write_bytes(b"".join(lines[:at] + lines[at : at + 2][::-1] + lines[at + 2 :]))

    def _truncate(self, _: Path, paths: list[Path], __: Path) -> None:
        path = self._pick(paths)
        data = path.read_bytes()
        path.write_bytes(data[: self.other % (len(data) + 1)])

    def _insert(self, _: Path, paths: list[Path], __: Path) -> None:
        """A forged line, somewhere."""
        path = self._pick(paths)
        lines, at = self._lines(path)
        before = parse_line(lines[at].rstrip(b"\n")) if lines else None
        previous = before.digest if before else GENESIS
        number = before.number + 1 if before else 1
        forged, _digest = make_line(number, "2020", RECORDS[self.record], previous, _no_key)
        path.write_bytes(b"".join([*lines[: at + 1], forged, *lines[at + 1 :]]))

    def _append(self, _: Path, paths: list[Path], __: Path) -> None:
        """Forged lines that follow the last one."""
        path = paths[-1]
        last = parse_line((path.read_bytes().splitlines() or [b""])[-1])
        number, previous, made = last.number if last else 0, last.digest if last else GENESIS, b""
        for _count in range(1 + self.other % 30):
            number += 1
            is_checkpoint = self.record in ("end", "rotation")
            sign = _no_key if is_checkpoint else None
            line, previous = make_line(number, "2020", RECORDS[self.record], previous, sign)
            made += line
        path.write_bytes(path.read_bytes() + made)

    def _rechain(self, _: Path, paths: list[Path], __: Path) -> None:
        """Numbers and hashes of all lines, anew; signatures stay as they are."""
        previous, number = GENESIS, 0
        for path in paths:
            made = []
            for data in path.read_bytes().splitlines():
                line = parse_line(data)
                if line is None:
                    made.append(data + b"\n")
                    continue
                if line.kind == RecordKind.FILE and not number:
                    number, previous = line.number - 1, bytes.fromhex(line.fields["previous"])
                number += 1
                body = re.sub(rb'^\{"n":\d+', b'{"n":%d' % number, line.body)
                previous = digest_of(previous, body)
                made.append(b'%s,"hash":"%s"}\n' % (body, previous.hex().encode()))
            path.write_bytes(b"".join(made))

    def _rebuild_head(self, folder: Path, _: list[Path], __: Path) -> None:
        """A head from any checkpoint of the log."""
        found = [line for line in lines_of(folder) if b'"kind":"checkpoint"' in line]
        if found:
            (folder / f"{LOG}.head").write_bytes(found[self.other % len(found)] + b"\n")

    def _newest_head(self, folder: Path, _: list[Path], __: Path) -> None:
        found = [line for line in lines_of(folder) if b'"kind":"checkpoint"' in line]
        if found:
            (folder / f"{LOG}.head").write_bytes(found[-1] + b"\n")

    def _delete_head(self, folder: Path, _: list[Path], __: Path) -> None:
        (folder / f"{LOG}.head").unlink(missing_ok=True)

    def _restart(self, folder: Path, _: list[Path], __: Path) -> None:
        restart(folder)


def _no_key(_: bytes) -> bytes:
    return bytes(64)


KINDS = sorted(
    name[1:]
    for name in vars(Attack)
    if name.startswith("_") and not name.startswith("__") and name not in ("_pick", "_lines")
)
ATTACKS = st.lists(
    st.builds(Attack, st.sampled_from(KINDS), NUMBERS, NUMBERS, st.sampled_from(sorted(RECORDS))),
    min_size=1,
    max_size=6,
)
