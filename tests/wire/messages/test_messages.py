"""Messages: each survives the trip, nothing else gets in."""

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.blocks import BlockKey, CacheGroup, GroupKind, Layout, Plane
from prfaas.core.kv.shipping import MANIFEST_BYTES_MAX
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.errors import PeerError
from prfaas.wire.frames import FrameDecoder
from prfaas.wire.messages.base import Goodbye, Message, Ping, Pong, Unsupported
from prfaas.wire.messages.codec import KINDS, AnyMessage, UnknownMessageError, decode, encode
from prfaas.wire.messages.comparing import Altered, Compare, Compared
from prfaas.wire.messages.engine import (
    EngineHello,
    Load,
    LoadDone,
    Lookup,
    LookupDone,
    Push,
    PushDone,
    Store,
    StoreDone,
    Touch,
    TransferOver,
)
from prfaas.wire.messages.fields import (
    GROUPS_MAX,
    PULL_KEYS_MAX,
    SOURCES_MAX,
    TICKET_BYTES_MAX,
    TIERS_MAX,
    Key,
    keys_of,
    wire_keys,
)
from prfaas.wire.messages.gateway import (
    Evicted,
    LinkLease,
    Order,
    OrderDone,
    PoolState,
    Snapshot,
    SnapshotEnd,
    Stored,
    Subscribe,
    TierUse,
    TransferEnded,
)
from prfaas.wire.messages.layouts import (
    FACTS_BYTES_MAX,
    LAYOUTS_MAX,
    LayoutFacts,
    bounded,
    layout_spec,
)
from prfaas.wire.messages.link import (
    Abort,
    Accepted,
    Arrived,
    Commit,
    Committed,
    Connections,
    Decodes,
    Join,
    Missing,
    Offer,
    PoolHello,
    Pull,
    Refused,
    Release,
    Resumed,
)
from prfaas.wire.messages.survey import EngineShape, Survey, Surveyed

LAYOUT = Layout(
    b"L" * 32,
    16,
    "seed",
    (
        CacheGroup(0, GroupKind.FULL_ATTENTION, 16, 1024, planes=(Plane("bfloat16", 1024),)),
        CacheGroup(1, GroupKind.LINEAR_STATE, 64, 2048),
        CacheGroup(2, GroupKind.SLIDING_WINDOW, 32, 512, 128),
    ),
)
SPEC = layout_spec(LAYOUT)
KEYS = [(0, b"a" * 32), (1, b"b" * 32)]
TRANSFER = b"t" * 16
FACTS = {"model.weights": "ab12", "group.0.dtypes": '["float32"]'}
EVERY: list[AnyMessage] = [
    Ping(),
    Ping(at_ns=7),
    Pong(at_ns=7),
    Pong(at_ns=7, received={3: 4}, busy=0.5),
    Decodes(codecs=["exponent-window-1"]),
    Join(pool="prfaas-pool", link="word"),
    Resumed(epoch="e"),
    Arrived(transfer_id=TRANSFER, layout_id=b"L" * 32, keys=[(0, b"h" * 32)]),
    Committed(transfer_id=TRANSFER),
    EngineHello(
        engine="e", layout=SPEC, row_bytes=4096, num_rows=8, extents={0: [(0, 1024)], 1: [(5, 6)]}
    ),
    Push(transfer_id=TRANSFER, peer="pd-pool", ticket=b"sealed"),
    Store(job=1, keys=KEYS, rows=[3, 4], transfer_id=TRANSFER, pushed=[True, False]),
    StoreDone(job=1, stored=True),
    PushDone(transfer_id=TRANSFER, rest=KEYS),
    Lookup(job=2, keys=KEYS, transfer_id=TRANSFER, source="prfaas-pool"),
    LookupDone(job=2, found=b"\0\1\2"),
    TransferOver(transfer_id=TRANSFER),
    Load(job=3, keys=KEYS, rows=[0, 1]),
    LoadDone(job=3, loaded=b"\1\0"),
    Touch(keys=KEYS),
    Goodbye(reason="x"),
    PoolHello(pool="prfaas-pool", epoch="ab", link="l"),
    PoolHello(pool="prfaas-pool", epoch="ab", link="l", codecs=["exponent-window-1"]),
    Offer(transfer_id=TRANSFER, ticket=b"sealed", blocks={0: bytes(64), 3: bytes(32)}),
    Order(job=1, effect="purge", source="prfaas-pool", for_ns=10**9, is_dry=True),
    Order(job=9, effect="purge", tenant="a" * 32),
    Order(job=9, effect="pin", hashes=b"h" * 64, tenant="a" * 32, for_ns=10**9),
    LinkLease(bits_per_s=10**9, for_ns=3 * 10**9),
    OrderDone(job=9, was_in_force=True),
    OrderDone(job=9, num_blocks=2, host_bytes=256, num_left_out=1),
    Compare(job=2, layout_id=b"L" * 32, pairs=[(KEYS[0], KEYS[0])], limits={"float32": 0.02}),
    Compared(job=2, num_equal=1, num_different=2, num_missing=3, worst={"bfloat16": 0.5}),
    Compared(
        job=3,
        num_equal=0,
        num_different=1,
        num_missing=1,
        worst={"bfloat16": 0.5},
        altered=[Altered(0, "prfaas-pool", is_inherited=True)],
        missing=[1],
    ),
    OrderDone(
        job=1,
        num_blocks=5,
        host_bytes=6,
        disk_bytes=7,
        shared_bytes=8,
        num_transfers=1,
        problem="disk",
    ),
    Accepted(transfer_id=TRANSFER),
    Refused(transfer_id=TRANSFER, reason="expired"),
    Commit(transfer_id=TRANSFER, num_blocks=7, missing=KEYS),
    Pull(transfer_id=TRANSFER, source="prfaas-pool", keys=KEYS, ticket=b"sealed"),
    Missing(transfer_id=TRANSFER, keys=KEYS),
    Abort(transfer_id=TRANSFER, kind=TransferEnd.NO_ROOM, reason="client left"),
    Release(transfer_id=TRANSFER),
    Subscribe(gateway="gateway"),
    Snapshot(epoch="ab", next_seq=4, layout_id=b"L" * 32, keys=KEYS),
    SnapshotEnd(epoch="ab", next_seq=4, takes=["pull"]),
    Unsupported(kind="from_the_future", job=3),
    Connections(num_max=4),
    Stored(seq=5, layout_id=b"L" * 32, keys=KEYS),
    Evicted(seq=6, layout_id=b"L" * 32, keys=KEYS),
    TransferEnded(
        seq=7,
        transfer_id=TRANSFER,
        direction="sent",
        peer="pd-pool",
        kind=TransferEnd.COMMITTED,
        reason="",
        num_blocks=1,
        num_bytes=2,
        duration_ns=3,
        last_block_age_ns=4,
    ),
    PoolState(
        seq=8,
        layouts={"e": SPEC},
        links={"pd-pool": True},
        tiers={"host": TierUse(used_bytes=1, capacity_bytes=2, num_blocks=1)},
        num_leased=1,
        leased_bytes=2,
        facts=[LayoutFacts(layout_id=b"L" * 32, facts=FACTS, model="org/name@0123")],
    ),
    EngineHello(
        engine="e",
        layout=SPEC,
        row_bytes=8,
        num_rows=8,
        extents={},
        facts=FACTS,
        model="m",
        runs={0: [(0, 1, 2, 3, 4, 5)]},
        shape=EngineShape(ranks=8, block_tokens=272),
    ),
    Survey(),
    Surveyed(
        layouts={"e": SPEC},
        shapes={"e": EngineShape(ranks=8, block_tokens=272)},
        facts=[LayoutFacts(layout_id=b"L" * 32, facts=FACTS)],
    ),
]


def named(message: Message) -> str:
    return type(message).__name__


def raw(message: Message) -> dict[str, Any]:
    """A message as a map, to be damaged."""
    decoded: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    return decoded


def test_the_list_of_messages_here_is_complete() -> None:
    assert {type(message) for message in EVERY} == set(KINDS)


@pytest.mark.parametrize("message", EVERY, ids=named)
def test_every_message_survives_the_trip(message: Message) -> None:
    (frame,) = FrameDecoder().feed(encode(message))
    assert decode(frame.payload) == message


def test_a_message_of_an_unknown_kind_is_answered_and_damage_is_not() -> None:
    newer = {"t": "from_the_future", "job": 7, "what": [1, None]}
    with pytest.raises(UnknownMessageError) as caught:
        decode(msgspec.msgpack.encode(newer))
    assert caught.value.answer == Unsupported(kind="from_the_future", job=7)
    for job in (-1, 2**60, True, "7", None, [1]):
        with pytest.raises(UnknownMessageError) as caught:
            decode(msgspec.msgpack.encode(newer | {"job": job}))
        assert caught.value.answer.job == 0
    damaged: list[object] = [{"t": ""}, {"t": "x" * 65}, {"t": 7}, {"t": "pull"}, {}, [], "newer"]
    for wrong in damaged:
        with pytest.raises(PeerError) as refused:
            decode(msgspec.msgpack.encode(wrong))
        assert not isinstance(refused.value, UnknownMessageError)


@pytest.mark.parametrize("message", EVERY, ids=named)
def test_unknown_fields_are_ignored(message: Message) -> None:
    newer = raw(message) | {"from_the_future": {"x": [1, None]}}
    assert decode(msgspec.msgpack.encode(newer)) == message


@pytest.mark.parametrize("message", EVERY, ids=named)
def test_a_missing_field_is_refused_unless_it_has_a_default(message: Message) -> None:
    fields = msgspec.structs.fields(message)
    for field in fields:
        rest = {key: value for key, value in raw(message).items() if key != field.name}
        if field.required:
            with pytest.raises(PeerError, match=field.name):
                decode(msgspec.msgpack.encode(rest))
        else:
            assert named(decode(msgspec.msgpack.encode(rest))) == named(message)


@pytest.mark.parametrize("message", EVERY, ids=named)
def test_a_field_of_another_type_is_refused(message: Message) -> None:
    for field in msgspec.structs.fields(message):
        wrong = raw(message) | {field.name: {"not": {"what": 1.5}}}
        with pytest.raises(PeerError, match="not a prfaas message"):
            decode(msgspec.msgpack.encode(wrong))


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        (Subscribe(gateway="g"), "gateway", "g" * 65),
        (Subscribe(gateway="g"), "gateway", ""),
        (PoolHello(pool="p", epoch="e", link="l"), "pool", "p" * 65),
        (PoolHello(pool="p", epoch="e", link="l"), "epoch", "e" * 513),
        (Abort(transfer_id=TRANSFER, reason=""), "reason", "r" * 513),
        (Abort(transfer_id=TRANSFER), "kind", "committed"),
        (Abort(transfer_id=TRANSFER), "kind", "whatever"),
        (Offer(transfer_id=TRANSFER), "transfer_id", b"t" * 15),
        (Offer(transfer_id=TRANSFER), "transfer_id", b"t" * 17),
        (Offer(transfer_id=TRANSFER), "ticket", b"t" * (TICKET_BYTES_MAX + 1)),
        (Stored(seq=0, layout_id=b"L" * 32, keys=[]), "layout_id", b"L" * 33),
        (Stored(seq=0, layout_id=b"L" * 32, keys=[]), "keys", [(0, b"short")]),
        (Stored(seq=0, layout_id=b"L" * 32, keys=[]), "keys", [(-1, b"h" * 32)]),
        (Commit(transfer_id=TRANSFER, num_blocks=0), "num_blocks", -1),
        (Commit(transfer_id=TRANSFER, num_blocks=0), "num_blocks", 2**53 + 1),
        (Load(job=0, keys=[], rows=[]), "rows", [-1]),
        (LoadDone(job=0, loaded=b""), "sources", ["s"] * (SOURCES_MAX + 1)),
        (Store(job=0, keys=[], rows=[]), "sources", ["s" * 65]),
        (Store(job=0, keys=[], rows=[]), "sources", ["\N{GRINNING FACE}" * 64]),
        (Offer(transfer_id=TRANSFER), "blocks", {0: bytes(MANIFEST_BYTES_MAX + 1)}),
        (Offer(transfer_id=TRANSFER), "blocks", dict.fromkeys(range(GROUPS_MAX + 1), b"")),
        (Order(job=0, effect="purge", source="s"), "source", "s" * 65),
        (
            Pull(transfer_id=TRANSFER, source="p", keys=[]),
            "keys",
            [(0, b"h" * 32)] * (PULL_KEYS_MAX + 1),
        ),
    ],
)
def test_a_value_outside_its_limits_is_refused(message: Message, field: str, value: object) -> None:
    assert decode(msgspec.msgpack.encode(raw(message))) == message
    with pytest.raises(PeerError, match="not a prfaas message"):
        decode(msgspec.msgpack.encode(raw(message) | {field: value}))


@given(payload=st.binary(max_size=200))
def test_garbage_is_a_peer_error(payload: bytes) -> None:
    with pytest.raises(PeerError):
        decode(payload)


@given(message=st.sampled_from(EVERY), place=st.integers(0, 10_000), byte=st.integers(1, 255))
def test_a_damaged_message_is_a_message_or_a_peer_error(
    message: Message, place: int, byte: int
) -> None:
    payload = bytearray(msgspec.msgpack.encode(message))
    payload[place % len(payload)] ^= byte
    with contextlib.suppress(PeerError):
        assert isinstance(decode(bytes(payload)), Message)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc0",
        b"\x81\xa1t\xa5nosuch",
        b"\x81\xa1t\xa2\xff\xfe",
        b"\x81\xa2\xff\xfe\xc0",
        b"\x82\xa1t\xa9subscribe\xa7gateway\xa2\xff\xfe",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x82\xa1t\xa4ping\xa1x" + b"\x91" * 100_000,
    ],
    ids=lambda payload: payload[:8].hex(),
)
def test_known_traps_are_peer_errors(payload: bytes) -> None:
    with pytest.raises(PeerError):
        decode(payload)


def test_a_layout_survives_the_trip() -> None:
    assert SPEC.layout() == LAYOUT


@pytest.mark.parametrize("tokens_per_block", [8, 24])
def test_a_layout_whose_blocks_end_between_hashes_is_refused(tokens_per_block: int) -> None:
    """No hash names the end of such a block: an index fed with it would name another block."""
    hello = raw(PoolState(seq=0, layouts={"e": SPEC}, links={}))
    hello["layouts"]["e"]["groups"][0]["tokens_per_block"] = tokens_per_block
    with pytest.raises(PeerError, match="tokens_per_hash"):
        decode(msgspec.msgpack.encode(hello))


def test_a_pool_has_few_tiers_and_need_not_tell_of_them() -> None:
    use = TierUse(used_bytes=1, capacity_bytes=2, num_blocks=1)
    state = raw(PoolState(seq=0, layouts={}, links={}, tiers={"host": use}))
    for missing in ("tiers", "num_leased", "leased_bytes"):
        del state[missing]
    told = decode(msgspec.msgpack.encode(state))
    assert isinstance(told, PoolState)
    assert (told.tiers, told.num_leased, told.leased_bytes) == ({}, 0, 0)
    many = {f"tier-{number}": use for number in range(TIERS_MAX + 1)}
    with pytest.raises(PeerError, match="tiers"):
        decode(msgspec.msgpack.encode(raw(PoolState(seq=0, layouts={}, links={}, tiers=many))))


@given(
    keys=st.lists(st.tuples(st.integers(0, 2**53), st.binary(min_size=32, max_size=32)), max_size=5)
)
def test_keys_survive_the_trip(keys: list[Key]) -> None:
    assert keys_of(keys) == [BlockKey(*key) for key in keys]
    assert wire_keys(keys_of(keys)) == keys


@pytest.mark.parametrize(
    "facts",
    [
        {"a": "x" * 161},
        {"a" * 129: "x"},
        {"": "x"},
        {"a b": "x"},
        {"a\n": "x"},
        {"a": "two\nlines"},
        {"a": "\x1b[31mred"},
        {"a": "\u202eleft"},
        {str(number): "x" for number in range(1025)},
        {"a": 1},
        ["a"],
    ],
)
def test_facts_are_short_plain_and_few(facts: object) -> None:
    state, hello = (
        raw(next(m for m in EVERY if isinstance(m, kind) and m.facts))
        for kind in (PoolState, EngineHello)
    )
    [of_layout] = state["facts"]
    for damaged in (state | {"facts": [of_layout | {"facts": facts}]}, hello | {"facts": facts}):
        with pytest.raises(PeerError):
            decode(msgspec.msgpack.encode(damaged))


@pytest.mark.parametrize("message", [m for m in EVERY if hasattr(m, "facts")], ids=named)
def test_a_peer_of_an_earlier_version_sends_no_facts_and_is_understood(message: Message) -> None:
    older = {name: value for name, value in raw(message).items() if name not in ("facts", "model")}
    found = decode(msgspec.msgpack.encode(older))
    assert isinstance(found, EngineHello | PoolState | Surveyed)
    assert not found.facts


def test_a_message_holds_facts_of_few_layouts_and_few_bytes() -> None:
    def of(number: int, num_bytes: int) -> LayoutFacts:
        facts = {f"{i}": "x" * 100 for i in range(num_bytes // 100)}
        return LayoutFacts(layout_id=number.to_bytes(32, "big"), facts=facts or {"a": "b"})

    assert len(bounded(of(number % 100, 1) for number in range(1000))) == LAYOUTS_MAX
    large = bounded(of(number, 90_000) for number in range(LAYOUTS_MAX))
    assert 8 < len(large) < LAYOUTS_MAX
    assert sum(each.num_bytes for each in large) <= FACTS_BYTES_MAX
    assert bounded([LayoutFacts(layout_id=b"L" * 32, facts={})]) == []
