"""Tickets as bytes: what a gateway signed comes out, nothing else does."""

import contextlib
import datetime
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.transfer.tickets import Ticket, TicketRefusal, TicketRefusedError
from prfaas.errors import ConfigError
from prfaas.wire.identity import VALID_DAYS, identity_in, make_authority, make_identity
from prfaas.wire.messages.fields import TICKET_BYTES_MAX
from prfaas.wire.tickets import TicketOpener, TicketSigner

NOW = time.time_ns() + 3600 * 10**9
"""After the identities of the tests are made, however long the tests before take."""
DAY_NS = 86400 * 10**9
TICKET = Ticket(
    b"t" * 16,
    "ab" * 8,
    bytes(range(32)),
    "prfaas-pool",
    "pd-pool",
    b"n" * 32,
    12345,
    NOW,
    2.5,
    10**9,
    f"00-{'a' * 32}-{'b' * 16}-01",
)
GATEWAYS = frozenset({"gateway"})


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("identities")
    make_authority(directory)
    for name in ("gateway", "prfaas-pool"):
        make_identity(directory, name)
    return directory


@pytest.fixture(scope="module")
def sealed(local: Path) -> bytes:
    return TicketSigner(identity_in(local, "gateway")).seal(TICKET)


@pytest.fixture(scope="module")
def opener(local: Path) -> TicketOpener:
    return TicketOpener(local / "ca.pem", GATEWAYS)


def refusal(opener: TicketOpener, data: bytes, now_ns: int = NOW) -> TicketRefusal:
    with pytest.raises(TicketRefusedError) as caught:
        opener.open(data, now_ns)
    return caught.value.reason


def test_what_was_sealed_is_what_is_opened(opener: TicketOpener, sealed: bytes) -> None:
    assert opener.open(sealed, NOW) == TICKET
    assert len(sealed) < TICKET_BYTES_MAX


def test_a_ticket_of_the_largest_numbers_and_names_survives(
    local: Path, opener: TicketOpener
) -> None:
    large = replace(
        TICKET, tenant="t" * 64, source="s" * 64, bytes_max=2**53, expires_at_ns=2**63 - 1
    )
    assert opener.open(TicketSigner(identity_in(local, "gateway")).seal(large), NOW) == large


@pytest.mark.parametrize(
    "trace", ["x", TICKET.trace + "\n", TICKET.trace * 2, TICKET.trace.upper(), "0" * 10_000]
)
def test_a_trace_is_w3c_context_or_none(local: Path, opener: TicketOpener, trace: str) -> None:
    signer = TicketSigner(identity_in(local, "gateway"))
    untraced = replace(TICKET, trace="")
    assert opener.open(signer.seal(untraced), NOW) == untraced
    assert refusal(opener, signer.seal(replace(TICKET, trace=trace))) is TicketRefusal.MALFORMED


def test_a_pool_can_not_sign_tickets(local: Path, opener: TicketOpener) -> None:
    """Its certificate is of the same authority, its name is not on the list."""
    data = TicketSigner(identity_in(local, "prfaas-pool")).seal(TICKET)
    assert refusal(opener, data) is TicketRefusal.UNKNOWN_SIGNER


def test_a_gateway_of_another_deployment_can_not_sign_tickets(
    opener: TicketOpener, tmp_path: Path
) -> None:
    make_authority(tmp_path)
    data = TicketSigner(make_identity(tmp_path, "gateway")).seal(TICKET)
    assert refusal(opener, data) is TicketRefusal.UNKNOWN_SIGNER


def test_a_certificate_that_signed_itself_can_not_sign_tickets(
    opener: TicketOpener, tmp_path: Path
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gateway")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("gateway")])
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=9))
        .add_extension(names, critical=False)
        .sign(key, hashes.SHA256())
    )
    identity = identity_in(tmp_path, "gateway")
    identity.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    identity.key.write_bytes(pem_of(key))
    assert refusal(opener, TicketSigner(identity).seal(TICKET)) is TicketRefusal.UNKNOWN_SIGNER


def test_the_certificate_of_another_under_a_pools_signature_is_refused(
    local: Path, opener: TicketOpener, sealed: bytes
) -> None:
    """A gateway's certificate is public: only its key makes a ticket."""
    forged = msgspec.msgpack.decode(TicketSigner(identity_in(local, "prfaas-pool")).seal(TICKET))
    forged["certificates"] = msgspec.msgpack.decode(sealed)["certificates"]
    assert refusal(opener, msgspec.msgpack.encode(forged)) is TicketRefusal.UNKNOWN_SIGNER


def test_a_certificate_that_ran_out_signs_nothing(opener: TicketOpener, sealed: bytes) -> None:
    assert refusal(opener, sealed, NOW + (VALID_DAYS + 1) * DAY_NS) is TicketRefusal.UNKNOWN_SIGNER
    assert refusal(opener, sealed, NOW - DAY_NS) is TicketRefusal.UNKNOWN_SIGNER


@pytest.mark.parametrize(
    "field", ["tenant", "layout_id", "source", "bytes_max", "expires_at_ns", "trace"]
)
def test_no_field_can_be_changed(opener: TicketOpener, sealed: bytes, field: str) -> None:
    outer = msgspec.msgpack.decode(sealed)
    inner = msgspec.msgpack.decode(outer["ticket"])
    value = inner[field]
    inner[field] = value + 1 if isinstance(value, int) else value[:-1] + value[:1]
    outer["ticket"] = msgspec.msgpack.encode(inner)
    assert refusal(opener, msgspec.msgpack.encode(outer)) is TicketRefusal.UNKNOWN_SIGNER


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", TicketRefusal.MISSING),
        (b"\xc0", TicketRefusal.MALFORMED),
        (b"\x80", TicketRefusal.MALFORMED),
        (b"\x91" * 5000, TicketRefusal.MALFORMED),
        (b"\0" * (TICKET_BYTES_MAX + 1), TicketRefusal.MALFORMED),
    ],
)
def test_what_is_no_ticket_is_refused(
    opener: TicketOpener, data: bytes, reason: TicketRefusal
) -> None:
    assert refusal(opener, data) is reason


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("certificates", []),
        ("certificates", [b"no certificate"]),
        ("certificates", [b"x" * 4000]),
        ("certificates", [b"x"] * 5),
        ("signature", b""),
        ("signature", b"s" * 257),
        ("ticket", b"t" * 1025),
        ("ticket", b"\x80"),
    ],
)
def test_parts_over_their_limits_are_malformed(
    opener: TicketOpener, sealed: bytes, field: str, value: object
) -> None:
    changed = msgspec.msgpack.decode(sealed) | {field: value}
    assert refusal(opener, msgspec.msgpack.encode(changed)) is TicketRefusal.MALFORMED


@given(data=st.binary(min_size=1, max_size=600))
def test_garbage_is_malformed(opener: TicketOpener, data: bytes) -> None:
    assert refusal(opener, data) is TicketRefusal.MALFORMED


@pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")
@given(place=st.integers(0, 10_000), byte=st.integers(1, 255))
def test_a_damaged_ticket_is_refused_or_the_same(
    opener: TicketOpener, sealed: bytes, place: int, byte: int
) -> None:
    """Some bytes, such as those of names of unknown fields, mean nothing."""
    data = bytearray(sealed)
    data[place % len(data)] ^= byte
    with contextlib.suppress(TicketRefusedError):
        assert opener.open(bytes(data), NOW) == TICKET


def test_a_certificate_of_an_unknown_version_is_refused(
    opener: TicketOpener, sealed: bytes
) -> None:
    version_3, version_4 = b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x03"
    assert sealed.count(version_3) == 1
    with pytest.raises(TicketRefusedError, match="version"):
        opener.open(sealed.replace(version_3, version_4), NOW)


def pem_of(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def test_a_key_that_can_not_sign_tickets_is_the_operators_mistake(tmp_path: Path) -> None:
    make_authority(tmp_path)
    identity = make_identity(tmp_path, "gateway")
    identity.key.write_bytes(pem_of(rsa.generate_private_key(65537, 2048)))
    with pytest.raises(ConfigError, match="elliptic-curve"):
        TicketSigner(identity)
    identity.key.write_text("no key")
    with pytest.raises(ConfigError, match="prfaas identity"):
        TicketSigner(identity)


def test_an_authority_that_can_not_be_read_is_the_operators_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ca\.pem"):
        TicketOpener(tmp_path / "ca.pem", GATEWAYS)
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"ca\.pem"):
        TicketOpener(tmp_path / "ca.pem", GATEWAYS)
