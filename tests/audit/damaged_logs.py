"""Logs on disk, and damage to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from prfaas.audit.chain_file import ChainFile
from prfaas.audit.reading import logs_of, verify
from prfaas.audit.settings import AuditSettings
from prfaas.core.audit.chain import digest_of, parse_line
from prfaas.core.audit.records import CheckpointCause
from prfaas.core.audit.verification import VerificationReport

LOG = "pd-pool"
STEPS = st.lists(
    st.sampled_from(["record", "record", "batch", "checkpoint", "rotate", "restart", "crash"]),
    min_size=1,
    max_size=25,
)


def settings(folder: Path, **changes: object) -> AuditSettings:
    """Settings with all files in one folder."""
    return AuditSettings(folder, folder, **changes)  # type: ignore[arg-type]


def make_log(folder: Path, steps: list[str], *, is_clean: bool = True) -> None:
    """Write a log; `crash` leaves half a line."""
    file = ChainFile(settings(folder), LOG, lambda: 10**18)
    for number, step in enumerate(steps):
        match step:
            case "record" | "batch":
                record = {"kind": "movement", "bytes": number}
                file.append([(10**18, record)] * (1 if step == "record" else 3))
            case "checkpoint":
                file.checkpoint(CheckpointCause.LINES)
            case "rotate":
                file.rotate()
            case "restart" | "crash":
                if step == "restart":
                    file.checkpoint(CheckpointCause.END)
                file.close()
                if step == "crash":
                    path = list(logs_of(folder)[LOG].values())[-1]
                    path.write_bytes(path.read_bytes() + b'{"n":99,"at":"20')
                file = ChainFile(settings(folder), LOG, lambda: 10**18)
    if is_clean:
        file.checkpoint(CheckpointCause.END)
    file.close()


def verified(folder: Path, **known: object) -> VerificationReport:
    """Verify the log of a folder."""
    return verify(folder, LOG, logs_of(folder, LOG)[LOG], **known)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Damage:
    """One change to the files of a log.

    Attributes:
        kind: Name of the change.
        file: Number that selects a file.
        at: Number that selects a line, or a byte.
        other: A second one.
    """

    kind: str
    file: int
    at: int
    other: int

    def apply(self, folder: Path) -> bool:
        """Change a file; False if nothing is different."""
        paths = list(logs_of(folder)[LOG].values())
        path = paths[self.file % len(paths)]
        before = path.read_bytes()
        after = _CHANGES[self.kind](before, self.at, self.other)
        if after is None:
            path.unlink()
            return True
        path.write_bytes(after)
        return after != before


def _byte(data: bytes, at: int, other: int) -> bytes:
    place = at % len(data)
    return data[:place] + bytes([data[place] ^ (1 + other % 255)]) + data[place + 1 :]


def _on_lines(change: Callable[[list[bytes], int, int], None]) -> Callable[..., bytes]:
    def changed(data: bytes, at: int, other: int) -> bytes:
        lines = data.splitlines(keepends=True)
        change(lines, at % len(lines), other % len(lines))
        return b"".join(lines)

    return changed


def _swap(lines: list[bytes], one: int, other: int) -> None:
    lines[one], lines[other] = lines[other], lines[one]


def _rechain(lines: list[bytes], one: int, _: int) -> None:
    """Edit a line and compute all later hashes anew, as whoever has no key can."""
    first = parse_line(lines[one].rstrip(b"\n"))
    if first is None or b'"bytes"' not in first.body:
        return
    before = parse_line(lines[one - 1].rstrip(b"\n"))
    if before is None:
        return
    previous = before.digest
    lines[one] = lines[one].replace(b'"bytes":', b'"bytes":1')
    for number in range(one, len(lines)):
        body, mark, _rest = lines[number].partition(b',"hash":"')
        if mark:
            previous = digest_of(previous, body)
            lines[number] = b'%s,"hash":"%s"}\n' % (body, previous.hex().encode())


_CHANGES: dict[str, Callable[[bytes, int, int], bytes | None]] = {
    "byte": _byte,
    "drop": _on_lines(lambda lines, at, _: lines.__delitem__(at)),
    "swap": _on_lines(_swap),
    "repeat": _on_lines(lambda lines, at, other: lines.insert(other, lines[at])),
    "insert": _on_lines(lambda lines, at, _: lines.insert(at, b"\n")),
    "rechain": _on_lines(_rechain),
    "cut": lambda data, at, _: data[: at % len(data)],
    "cut_front": lambda data, at, _: data[1 + at % len(data) :],
    "unlink": lambda *_: None,
}
DAMAGES = st.builds(
    Damage,
    st.sampled_from(sorted(_CHANGES)),
    st.integers(0, 50),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
)
