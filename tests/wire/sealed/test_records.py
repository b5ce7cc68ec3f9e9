"""Records of sealed data connections: any split gives the same blocks, any attack is noticed."""

from __future__ import annotations

import contextlib
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.transfer.link_encryption import LinkEncryption
from prfaas.errors import PeerError
from prfaas.wire.fragments import FRAGMENT_BYTES_MAX
from prfaas.wire.sealed.keys import KeyLimits
from prfaas.wire.sealed.records import (
    HEAD_BYTES,
    OPENING_BYTES,
    TAG_BYTES,
    ConnectionNumbers,
    Opener,
    SealError,
    decode_opening,
)
from tests.wire.sealed.ends import BOTH, Destination, Source, content, fragments, session

protections = st.sampled_from(BOTH)
sizes = st.lists(st.integers(1, 5000), min_size=1, max_size=6)
TINY = KeyLimits(records=3, num_bytes=4000)


@given(protections, sizes, st.integers(1, 3000), st.sampled_from([TINY, KeyLimits()]))
def test_any_split_of_the_stream_gives_the_same_fragments(
    encryption: LinkEncryption, sizes: list[int], step: int, limits: KeyLimits
) -> None:
    secret, sent = session(encryption), fragments(*sizes)
    source = Source(secret, limits=limits)
    destination = Destination(secret, source.opening, limits, step)
    destination.feed(b"".join(map(source.send, sent)))
    assert destination.came == content(sent)
    destination.stream.ended()


@pytest.mark.parametrize("encryption", BOTH)
def test_a_fragment_is_complete_without_the_one_after_it(encryption: LinkEncryption) -> None:
    secret, sent = session(encryption), fragments(700)
    source = Source(secret)
    destination = Destination(secret, source.opening)
    destination.feed(source.send(sent[0]))
    assert destination.came == content(sent)
    assert destination.stream.missing_bytes == HEAD_BYTES


def test_sealed_records_show_neither_content_nor_names() -> None:
    secret, (fragment,) = session(), fragments(4096)
    source = Source(secret)
    wire = source.opening + source.send(fragment)
    layout_id, key = fragment.block.name
    for hidden in (layout_id, key.block_hash, fragment.block.digest, bytes(fragment.data[:16])):
        assert hidden not in wire


@pytest.mark.parametrize("encryption", BOTH)
@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(lambda a, b, c: a + a, id="replay"),
        pytest.param(lambda a, b, c: b + a, id="reorder"),
        pytest.param(lambda a, b, c: a + c, id="leave one out"),
        pytest.param(lambda a, b, c: a + b[:HEAD_BYTES] + c[HEAD_BYTES:], id="swap bodies"),
        pytest.param(lambda a, b, c: a + b[HEAD_BYTES:] + b[:HEAD_BYTES], id="body before head"),
        pytest.param(lambda a, b, c: a[:-TAG_BYTES] + b + c, id="leave a tag out"),
        pytest.param(lambda a, b, c: a[:-40] + b + c, id="cut within a body"),
    ],
)
def test_changes_of_the_order_of_records_are_noticed(encryption, attack) -> None:  # type: ignore[no-untyped-def]
    secret, sent = session(encryption), fragments(900, 900, 900)
    source = Source(secret)
    parts = [source.send(fragment) for fragment in sent]
    destination = Destination(secret, source.opening)
    with pytest.raises(SealError):
        destination.feed(attack(*parts))
    assert destination.came in ([], content(sent[:1]))


@given(protections, st.integers(0, 2**32), st.integers(1, 255))
def test_a_changed_bit_gives_no_fragment(encryption: LinkEncryption, at: int, flip: int) -> None:
    secret, sent = session(encryption), fragments(300, 200)
    source = Source(secret)
    wire = bytearray(b"".join(map(source.send, sent)))
    at %= len(wire)
    wire[at] ^= flip
    destination = Destination(secret, source.opening)
    with pytest.raises(SealError):
        destination.feed(bytes(wire))
    assert destination.came == content(sent)[: len(destination.came)]


@given(protections, st.integers(0, OPENING_BYTES - 1), st.integers(1, 255))
def test_a_changed_opening_opens_nothing(encryption: LinkEncryption, at: int, flip: int) -> None:
    secret = session(encryption)
    opening = bytearray(Source(secret).opening)
    opening[at] ^= flip
    with pytest.raises(PeerError):
        Opener(secret, decode_opening(opening))


@pytest.mark.parametrize("encryption", BOTH)
@pytest.mark.parametrize(
    "other",
    [
        {"secret": b"x" * 32},
        {"link": "another word"},
        {"source": "pd-pool", "destination": "prfaas-pool"},
        {"source": "third-pool"},
        {"destination": "third-pool"},
    ],
    ids=["secret", "session", "reflected", "source", "destination"],
)
def test_records_of_another_session_are_refused(  # type: ignore[no-untyped-def]
    encryption, other
) -> None:
    there = Source(session(encryption, **other))
    here = session(encryption)
    with pytest.raises(SealError):
        Opener(here, decode_opening(there.opening))
    # Not even behind an opening that is right.
    destination = Destination(here, Source(here).opening)
    with pytest.raises(SealError):
        destination.feed(there.send(fragments(500)[0]))


@pytest.mark.parametrize("encryption", BOTH)
def test_records_swapped_between_connections_are_refused(encryption: LinkEncryption) -> None:
    secret, sent = session(encryption), fragments(500)
    one, other = Source(secret, 1), Source(secret, 2)
    destination = Destination(secret, one.opening)
    with pytest.raises(SealError):
        destination.feed(other.send(sent[0]))


def test_a_protection_cannot_be_exchanged_for_another() -> None:
    opening = decode_opening(Source(session(LinkEncryption.NETWORK)).opening)
    with pytest.raises(SealError):
        Opener(session(LinkEncryption.SEALED), opening)


@given(protections, st.integers(1, 10**6))
def test_an_end_within_a_fragment_is_noticed(encryption: LinkEncryption, cut: int) -> None:
    secret, (fragment,) = session(encryption), fragments(600)
    source = Source(secret)
    destination = Destination(secret, source.opening)
    wire = source.send(fragment)
    destination.feed(wire[: 1 + cut % (len(wire) - 1)])
    assert not destination.came
    with pytest.raises(SealError, match="cut"):
        destination.stream.ended()


@given(protections, st.binary(max_size=4096))
def test_noise_is_refused(encryption: LinkEncryption, noise: bytes) -> None:
    secret = session(encryption)
    destination = Destination(secret, Source(secret).opening)
    with contextlib.suppress(SealError):
        destination.feed(noise)
    assert not destination.came


@given(st.binary(min_size=OPENING_BYTES, max_size=OPENING_BYTES))
def test_a_noisy_opening_is_a_peer_error(noise: bytes) -> None:
    with pytest.raises(PeerError):
        decode_opening(noise)


@pytest.mark.parametrize("encryption", BOTH)
def test_no_stream_needs_more_memory_than_one_fragment(encryption: LinkEncryption) -> None:
    secret, sent = session(encryption), fragments(*[FRAGMENT_BYTES_MAX] * 4)
    source = Source(secret)
    wire = [source.send(fragment) for fragment in sent]
    destination = Destination(secret, source.opening)
    destination.came = _Nothing()
    tracemalloc.start()
    try:
        for part in wire:
            destination.feed(part)
        with contextlib.suppress(SealError):
            destination.feed(bytes(8 * FRAGMENT_BYTES_MAX))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 * FRAGMENT_BYTES_MAX  # The zeros themselves are eight of them.


class _Nothing(list):  # type: ignore[type-arg]
    def append(self, _: object) -> None: ...


def test_a_diverted_fragment_is_checked_as_a_whole() -> None:
    """Another connection took its place: what follows is written beside it."""
    secret, sent = session(LinkEncryption.NETWORK), fragments(1000, 500)
    source = Source(secret)
    destination = Destination(secret, source.opening)
    first = source.send(sent[0])
    destination.feed(first[: HEAD_BYTES + 400])
    beside = memoryview(bytearray(FRAGMENT_BYTES_MAX))
    destination.stream.divert(beside)
    destination._into[:400] = bytes(400)
    destination.feed(first[HEAD_BYTES + 400 :])
    assert bytes(beside[:1000]) == sent[0].data
    destination.feed(source.send(sent[1]))
    assert destination.came[1:] == content(sent[1:])


def test_a_number_is_used_once_and_numbers_take_bounded_memory() -> None:
    numbers, window = ConnectionNumbers(), ConnectionNumbers.WINDOW
    for number in range(0, 6 * window, 2):
        numbers.claim(number)
        with pytest.raises(SealError):
            numbers.claim(number)
    numbers.claim(5 * window + 1)  # Late, and within the window.
    with pytest.raises(SealError):
        numbers.claim(window + 1)
    assert len(numbers._used) <= 2 * window + 1
