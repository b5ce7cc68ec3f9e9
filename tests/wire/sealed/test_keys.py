"""Keys of sealed data connections: no pair of key and nonce is ever used twice."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.transfer.link_encryption import LinkEncryption
from prfaas.wire.sealed import keys
from prfaas.wire.sealed.keys import LIMITS, KeyLimits, LinkSecret, RecordKeys
from prfaas.wire.sealed.records import ConnectionNumbers, SealError
from tests.wire.sealed.ends import session

ciphers = st.lists(st.integers(0, 3000), max_size=30)
limits = st.builds(KeyLimits, st.integers(1, 8), st.integers(1, 6000))
connections = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), ciphers), max_size=12)


class Watch:
    """Makes ciphers, and keeps their keys."""

    def __init__(self) -> None:
        self.key = b""

    def __call__(self, key: bytes) -> AESGCM:
        self.key = key
        return AESGCM(key)


@given(connections, limits)
def test_no_pair_of_key_and_nonce_is_used_twice(
    dialled: list[tuple[int, int, list[int]]], limits: KeyLimits
) -> None:
    """Over sessions, reconnects that repeat a number (refused before a key is used), and
    rotations."""
    used: set[tuple[bytes, bytes]] = set()
    numbers: dict[int, ConnectionNumbers] = {}
    for index, number, sizes in dialled:
        try:
            numbers.setdefault(index, ConnectionNumbers()).claim(number)
        except SealError:
            continue
        watch = Watch()
        secret = session(secret=bytes([index]) * 32).of_connection(number)
        taking = RecordKeys(secret, limits, watch)
        for size in sizes:
            _, nonce = taking.take(size)
            assert len(nonce) == 12
            assert (watch.key, nonce) not in used
            used.add((watch.key, nonce))


@given(ciphers, limits)
def test_a_key_is_used_within_its_limits(sizes: list[int], limits: KeyLimits) -> None:
    watch, spent = Watch(), dict[bytes, list[int]]()
    taking = RecordKeys(b"s" * 32, limits, watch)
    for size in sizes:
        taking.take(size)
        spent.setdefault(watch.key, []).append(size)
    for records in spent.values():
        assert len(records) <= limits.records
        assert sum(records) <= limits.num_bytes or len([size for size in records if size]) == 1


def test_default_limits_are_below_those_of_tls() -> None:
    assert LIMITS.records <= 2**24.5
    assert LIMITS.num_bytes <= 2**38.5 / 4


def test_sessions_connections_and_directions_have_their_own_keys() -> None:
    secrets = [
        session(),
        session(LinkEncryption.NETWORK),
        session(secret=b"x" * 32),
        session(source="pd-pool", destination="prfaas-pool"),
        session(link="other"),
        session(source="prfaas-poolpd", destination="-pool"),
    ]
    derived = {secret.of_connection(number) for secret in secrets for number in range(3)}
    assert len(derived) == 3 * len(secrets)
    assert len({secret.id for secret in secrets}) == len(secrets)


def test_a_session_has_32_random_bytes_and_does_not_show_them() -> None:
    secret = session(secret=keys.new_secret())
    assert secret.secret not in repr(secret).encode("latin-1")
    assert repr(secret.secret) not in repr(secret)
    with pytest.raises(ValueError, match="secret of 16 bytes"):
        session(secret=b"s" * 16)
    with pytest.raises(ValueError, match="tls"):
        LinkSecret(LinkEncryption.TLS, "a", "b", "c", b"s" * 32)
