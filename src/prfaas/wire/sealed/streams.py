"""Fragments to records and back: what is sent of a fragment, and what is read of a connection."""

from __future__ import annotations

from collections.abc import Callable

from prfaas.errors import PeerError
from prfaas.wire.fragments import (
    CODED_PREFIX_BYTES,
    FRAGMENT_BYTES_MAX,
    FragmentPrefix,
    decode_prefix,
    prefix_bytes,
)
from prfaas.wire.sealed.records import HEAD_BYTES, TAG_BYTES, Opener, Sealer, SealError

Place = Callable[[FragmentPrefix], memoryview]


class SealedParts:
    """Turns fragments into the bytes to send."""

    def __init__(self, sealer: Sealer) -> None:
        self._sealer = sealer
        self._room = memoryview(bytearray())

    def parts(self, prefix: memoryview, data: memoryview) -> list[memoryview]:
        """Return the bytes of a fragment, in order; valid until the next call.

        Args:
            prefix: Of the fragment, plain or coded.
            data: What follows it; not changed until the parts are sent.
        """
        head = bytes(prefix).ljust(CODED_PREFIX_BYTES, b"\0")
        if not self._sealer.is_encrypted:
            head_tag = self._sealer.tag(head)
            return [memoryview(head + head_tag), data, memoryview(self._sealer.tag(data))]
        wanted = HEAD_BYTES + len(data) + TAG_BYTES
        if len(self._room) < wanted:
            self._room = memoryview(bytearray(wanted))
        self._sealer.seal(head, self._room[:HEAD_BYTES])
        self._sealer.seal(data, self._room[HEAD_BYTES:wanted])
        return [self._room[:wanted]]


class SealedStream:
    """The bytes of a sealed data connection, opened into where each fragment belongs.

    A fragment is opened when all of it is there, so it gets its place only then. The reader writes
    the next bytes into `view` and reports their number; any split of the stream gives the same
    fragments. After a `PeerError` the stream is lost. It never needs more memory than for one
    fragment of FRAGMENT_BYTES_MAX, and nothing is read of a prefix that is not authenticated.

    Args:
        place: Where the bytes of a fragment go: as much memory as bytes follow its prefix.
    """

    def __init__(self, opener: Opener, place: Place) -> None:
        self._opener = opener
        self._place = place
        self._room = memoryview(bytearray(FRAGMENT_BYTES_MAX + TAG_BYTES + HEAD_BYTES))
        self._count = 0
        self._body: FragmentPrefix | None = None
        self._record_bytes = HEAD_BYTES
        """Size of the next record."""

    @property
    def view(self) -> memoryview:
        """Buffer for the next bytes; never empty. It ends after the head of the next fragment, so
        that one call reads all of a fragment."""
        return self._room[self._count : self._record_bytes + (HEAD_BYTES if self._body else 0)]

    @property
    def missing_bytes(self) -> int:
        """Bytes that the next record lacks."""
        return self._record_bytes - self._count

    def filled(self, num_bytes: int) -> FragmentPrefix | None:
        """Record that `num_bytes` bytes were written to the start of `view`; PeerError if a record
        fails its tag, or its content is no fragment.

        Returns:
            The fragment that they complete.
        """
        self._count += num_bytes
        done, size = None, self._record_bytes
        if self._body is not None and self._count >= size:
            done = self._body
            self._opener.open(self._room[:size], self._place(done))
            self._count -= size
            self._room[: self._count] = self._room[size : size + self._count]
            self._body, self._record_bytes = None, HEAD_BYTES
        if self._body is None and self._count == HEAD_BYTES:
            self._body, self._count = self._opened_head(), 0
            self._record_bytes = self._body.payload_bytes + TAG_BYTES
        return done

    def divert(self, nowhere: memoryview) -> None:
        """A fragment has a place only while it is opened: there is nothing to divert."""

    def ended(self) -> None:
        """The connection has ended.

        Raises:
            SealError: In the midst of a fragment.
        """
        if self._count or self._body is not None:
            raise SealError("a data connection was cut within a fragment")

    def let_go(self) -> None:
        """Keep no memory of a block."""
        self._room = memoryview(bytearray())

    def _opened_head(self) -> FragmentPrefix:
        head = bytearray(CODED_PREFIX_BYTES)
        self._opener.open(self._room[:HEAD_BYTES], head)
        return _decoded(head)


class ClearStream:
    """The same for a connection under `network`: bytes are written straight to their place.

    A fragment is complete when its tag was compared with what is there. The next one gets its place
    only after it was returned.

    Args:
        place: Where the bytes of a fragment go: as much memory as bytes follow its prefix.
    """

    def __init__(self, opener: Opener, place: Place) -> None:
        self._opener = opener
        self._place = place
        self._room = memoryview(bytearray(TAG_BYTES + HEAD_BYTES))
        self._count = 0
        self._body: FragmentPrefix | None = None
        self._data = memoryview(bytearray())
        self._left = 0
        """Bytes of the body that are not there."""

    @property
    def view(self) -> memoryview:
        """Buffer for the next bytes; never empty; PeerError if what came with the end of the last
        fragment is no head."""
        if self._body is None and self._count == HEAD_BYTES:
            self._begin()
        if self._left:
            return self._data[len(self._data) - self._left :]
        return self._room[self._count : HEAD_BYTES + (TAG_BYTES if self._body else 0)]

    @property
    def missing_bytes(self) -> int:
        """Bytes that the next record lacks."""
        if self._body is not None:
            return self._left + TAG_BYTES - self._count
        return HEAD_BYTES - self._count

    def filled(self, num_bytes: int) -> FragmentPrefix | None:
        """See `SealedStream.filled`."""
        if self._left:
            self._left -= num_bytes
            return None
        self._count += num_bytes
        done = None
        if self._body is not None and self._count >= TAG_BYTES:
            self._opener.check(self._data, self._room[:TAG_BYTES])
            done, rest = self._body, bytes(self._room[TAG_BYTES : self._count])
            self._room[: len(rest)] = rest
            self._count, self._body, self._data = len(rest), None, memoryview(b"")
        elif self._body is None and self._count == HEAD_BYTES:
            self._begin()
        return done

    def divert(self, nowhere: memoryview) -> None:
        """Another connection has taken the place of the fragment that is being read: go on beside
        it, with what is there, since the tag is over all of it."""
        taken = self._data
        self._data = nowhere[: len(taken)]
        self._data[:] = taken

    def ended(self) -> None:
        """See `SealedStream.ended`."""
        if self._count or self._body is not None:
            raise SealError("a data connection was cut within a fragment")

    def let_go(self) -> None:
        """Keep no memory of a block."""
        self._data = memoryview(b"")

    def _begin(self) -> None:
        head = self._room[:CODED_PREFIX_BYTES]
        self._opener.check(head, self._room[CODED_PREFIX_BYTES:HEAD_BYTES])
        self._body, self._count = _decoded(head), 0
        self._data = self._place(self._body)
        self._left = len(self._data)


def _decoded(head: memoryview | bytearray) -> FragmentPrefix:
    size = prefix_bytes(head)
    if any(head[size:]):
        raise PeerError("the padding of a fragment's head is not zero")
    return decode_prefix(head[:size])
