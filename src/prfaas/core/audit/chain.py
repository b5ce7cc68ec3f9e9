"""A line of an audit log, chained to the line before it.

    {"n":17,"at":"2026-11-23T03:25:46.123456Z","kind":"movement",...,"hash":"64 hex digits"}

`hash` is SHA-256 over the digest of the line before (32 bytes) and the bytes of this line before
`,"hash"`. A checkpoint has `"sig"` before `"hash"`: a signature of a fixed prefix, the digest of
the line before, and the bytes before `,"sig"`. Bytes are hashed as they are in the file, so that no
canonical form of JSON is needed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

FORMAT = 1
"""Version of the format, in the first line of each file."""
DIGEST_BYTES = 32
GENESIS = bytes(DIGEST_BYTES)
"""Digest before the first line of a log."""
LINE_BYTES_MAX = 16 << 10
"""A longer line is no line of an audit log."""
_DOMAIN = b"prfaas audit checkpoint 1\0"
"""Keeps a signature of anything else from passing for one of a checkpoint."""
_HASHED = re.compile(rb'(\{"n":.*),"hash":"([0-9a-f]{64})"\}', re.DOTALL)
_SIGNED = re.compile(rb'(.*),"sig":"([0-9a-f]{128})"', re.DOTALL)

Fields = Mapping[str, object]
Sign = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class Line:
    """A line whose hash has the right form."""

    body: bytes
    """The hashed bytes."""
    digest: bytes
    """The stated hash, 32 bytes."""
    fields: dict[str, Any]
    """All its fields, those of the frame included."""

    @property
    def number(self) -> int:
        """Its number in the log, from 1; 0 if it has none."""
        number = self.fields.get("n")
        return number if type(number) is int else 0

    @property
    def kind(self) -> str:
        """Kind of its record."""
        return str(self.fields.get("kind", ""))

    def follows(self, previous: bytes) -> bool:
        """Return True if its hash is that of its bytes after a line with this digest."""
        return digest_of(previous, self.body) == self.digest

    def signed(self, previous: bytes) -> tuple[bytes, bytes] | None:
        """The signed bytes of a checkpoint and their signature; None for other lines."""
        found = _SIGNED.fullmatch(self.body)
        if found is None:
            return None
        return _DOMAIN + previous + found[1], bytes.fromhex(found[2].decode())


def digest_of(previous: bytes, body: bytes) -> bytes:
    """Digest of a line after a line with the digest `previous`."""
    return hashlib.sha256(previous + body).digest()


def make_line(
    number: int, at: str, fields: Fields, previous: bytes, sign: Sign | None = None
) -> tuple[bytes, bytes]:
    """Write one line; returns the line with its newline, and its digest.

    Args:
        at: Time of the record, ISO 8601 in UTC with microseconds.
        fields: Its record: `kind`, then what belongs to the kind.
        previous: Digest of the line before.
        sign: Signs bytes; for checkpoints.
    """
    text = json.dumps({"n": number, "at": at, **fields}, separators=(",", ":"))
    body = text[:-1].encode()
    if sign is not None:
        body += b',"sig":"%s"' % sign(_DOMAIN + previous + body).hex().encode()
    digest = digest_of(previous, body)
    return b'%s,"hash":"%s"}\n' % (body, digest.hex().encode()), digest


def parse_line(data: bytes) -> Line | None:
    """Parse a line without its newline; None if it is no line of an audit log."""
    found = _HASHED.fullmatch(data) if len(data) <= LINE_BYTES_MAX else None
    if found is None:
        return None
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return Line(found[1], bytes.fromhex(found[2].decode()), fields)


class Head:
    """A copy of a checkpoint that has to be in the log. `data`: Content of the file; None if there
    is none."""

    def __init__(self, name: str, data: bytes | None) -> None:
        self.name, self._is_present = name, data is not None
        self.line = parse_line(data.removesuffix(b"\n")) if data is not None else None
        self.is_here = False
        """True if the log has this checkpoint."""

    def take(self, checkpoint: Line) -> None:
        """Compare with a valid checkpoint of the log."""
        if self.line is not None and self.line.number == checkpoint.number:
            self.is_here = self.line.body == checkpoint.body

    def damage(self, signed_lines: int) -> str | None:
        """Describe its absence from a log with this last signed line; None if it is here."""
        if self.line is None:
            state = "damaged" if self._is_present else "missing"
            return f"{self.name} is {state}: it would show if the end was cut off"
        if self.line.number > signed_lines:
            return (
                f"the end was cut off: {self.name} has a checkpoint at line {self.line.number}, "
                f"the last one here is at line {signed_lines}"
            )
        if not self.is_here:
            return f"{self.name} is no checkpoint of this log (line {self.line.number})"
        return None
