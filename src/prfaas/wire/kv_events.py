"""vLLM's KV events as they come over the wire, decoded: no I/O.

A batch is msgpack, `[time, events, rank]` as an array, or a map with such keys. An event is a map
with a `type`, or an array that begins with it. Hashes are numbers or bytes. What is not needed is
skipped without being built, token ids above all; keys and kinds that are not known are tolerated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from prfaas.errors import PeerError

HASHES_MAX = 65_536
EVENTS_MAX = 262_144
"""Limit of events in a batch; an engine publishes one batch per step."""
DEVICE_MEDIA = frozenset({None, "GPU"})
"""Older engines name no medium."""

_Hash = int | Annotated[bytes, msgspec.Meta(min_length=8, max_length=64)]
_Hashes = Annotated[list[_Hash], msgspec.Meta(max_length=HASHES_MAX)]
_Group = Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
_Word = Annotated[str, msgspec.Meta(max_length=64)]
_SKIPPED = msgspec.Raw()


class _Change(msgspec.Struct, gc=False):
    block_hashes: _Hashes
    medium: _Word | None = None
    group_idx: _Group | None = None
    locality: _Word | None = None


class _Stored(_Change, tag="BlockStored", gc=False):
    pass


class _Removed(_Change, tag="BlockRemoved", gc=False):
    pass


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _StoredArray(msgspec.Struct, tag="BlockStored", array_like=True, gc=False):
    block_hashes: _Hashes
    parent_block_hash: msgspec.Raw = _SKIPPED
    token_ids: msgspec.Raw = _SKIPPED
    block_size: msgspec.Raw = _SKIPPED
    lora_id: msgspec.Raw = _SKIPPED
    medium: _Word | None = None
    lora_name: msgspec.Raw = _SKIPPED
    extra_keys: msgspec.Raw = _SKIPPED
    group_idx: _Group | None = None
    kv_cache_spec_kind: msgspec.Raw = _SKIPPED
    kv_cache_spec_sliding_window: msgspec.Raw = _SKIPPED
    locality: _Word | None = None


class _RemovedArray(_Change, tag="BlockRemoved", array_like=True, gc=False):
    pass


class _ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


_Maps = _Stored | _Removed | _Cleared
_Arrays = _StoredArray | _RemovedArray | _ClearedArray
_Known = _Maps | _Arrays
_RawEvents = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=EVENTS_MAX)]


class _MapsBatch(msgspec.Struct, array_like=True, gc=False):
    ts: msgspec.Raw
    events: Annotated[list[_Maps], msgspec.Meta(max_length=EVENTS_MAX)]


class _ArraysBatch(msgspec.Struct, array_like=True, gc=False):
    ts: msgspec.Raw
    events: Annotated[list[_Arrays], msgspec.Meta(max_length=EVENTS_MAX)]


class _AnyBatch(msgspec.Struct, array_like=True, gc=False):
    ts: msgspec.Raw
    events: _RawEvents


class _MapBatch(msgspec.Struct, gc=False):
    events: _RawEvents


class _Tag(msgspec.Struct, gc=False):
    type: str = ""


_FAST = tuple(msgspec.msgpack.Decoder[Any](kind) for kind in (_MapsBatch, _ArraysBatch))
_ANY_BATCH: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_AnyBatch)
_MAP_BATCH: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_MapBatch)
_MAP_EVENT: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_Maps)
_ARRAY_EVENT: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_Arrays)
_TAG: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_Tag)
_RAWS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(list[msgspec.Raw])
_TEXT: msgspec.msgpack.Decoder[str] = msgspec.msgpack.Decoder(str)
_KINDS = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})
_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


@dataclass(slots=True)
class KvEventBatch:
    """Changes of device memory in a batch."""

    hashes: list[int | bytes] = field(default_factory=list)
    """Of all blocks that came or left, in order: whole, or the last 64 bits as numbers."""
    runs: list[tuple[int, bool, int]] = field(default_factory=list)
    """How many of them in a row came (True) or left, and their cache group."""
    cleared: bool = False
    """The prefix cache was cleared before these changes; what came earlier is left out."""
    num_events: int = 0
    num_elsewhere: int = 0
    """Events about other media, which pool nodes report."""
    num_unknown: int = 0
    """Events of kinds that are not known."""


def decode_batch(payload: bytes) -> KvEventBatch:
    """Decode a batch.

    Raises:
        PeerError: It is no batch, or an event of a known kind is not as it should be.
    """
    for decoder in _FAST:
        try:
            return _batch(decoder.decode(payload).events, 0)
        except _ERRORS:
            continue
    return _mixed(payload)


def _mixed(payload: bytes) -> KvEventBatch:
    """A batch with an event of a kind or encoding that the fast ways do not take."""
    try:
        is_map = payload[:1] >= b"\xde" or b"\x80" <= payload[:1] <= b"\x8f"
        raws = (_MAP_BATCH if is_map else _ANY_BATCH).decode(payload).events
        events = [_event(bytes(raw)) for raw in raws]
    except _ERRORS as error:
        raise PeerError(f"no batch of KV events: {error}") from None
    known = [event for event in events if event is not None]
    return _batch(known, len(events) - len(known))


def _event(raw: bytes) -> _Known | None:
    """One event; None for a kind that is not known."""
    is_map = raw[:1] >= b"\xde" or b"\x80" <= raw[:1] <= b"\x8f"
    if is_map:
        kind = _TAG.decode(raw).type
    else:
        parts = _RAWS.decode(raw)
        kind = _TEXT.decode(parts[0]) if parts else ""
    if kind not in _KINDS:
        return None
    event: _Known = (_MAP_EVENT if is_map else _ARRAY_EVENT).decode(raw)
    return event


def _batch(events: list[Any], num_unknown: int) -> KvEventBatch:
    batch = KvEventBatch(num_events=len(events) + num_unknown, num_unknown=num_unknown)
    hashes, runs = batch.hashes, batch.runs
    for event in events:
        # Hundreds of thousands come by each second: no isinstance over unions.
        kind = type(event)
        if kind is _Cleared or kind is _ClearedArray:
            hashes.clear()
            runs.clear()
            batch.cleared = True
        elif event.medium not in DEVICE_MEDIA or event.locality == "REMOTE":
            batch.num_elsewhere += 1
        else:
            hashes += event.block_hashes
            added = kind is _Stored or kind is _StoredArray
            runs.append((len(event.block_hashes), added, event.group_idx or 0))
    return batch
