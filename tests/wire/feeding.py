"""Bytes for a stream of fragments, without a connection."""

from __future__ import annotations

from prfaas.wire.fragments import FragmentPrefix, FragmentStream


def write_to(stream: FragmentStream, data: bytes | bytearray) -> list[FragmentPrefix]:
    """Write bytes to a stream as a reader does; return the fragments that they complete."""
    fragments, rest = [], memoryview(data)
    while rest:
        count = min(len(rest), len(stream.view))
        stream.view[:count] = rest[:count]
        rest = rest[count:]
        done = stream.filled(count)
        if done is not None:
            fragments.append(done)
    return fragments
