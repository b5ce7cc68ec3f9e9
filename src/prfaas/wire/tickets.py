"""Tickets as bytes: signed by a gateway with its identity, opened by pools.

    sealed ticket   msgpack: ticket (msgpack, as bytes), signature, certificates (DER, leaf first)

The signature is ECDSA over SHA-256 of a fixed prefix and the ticket's bytes. The certificate has to
be one that the deployment's authority signed and that names a gateway on the pool's list, so pools
need no key of the gateway's beforehand.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Set
from pathlib import Path
from typing import Annotated

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from prfaas.core.codec.codecs import Quality
from prfaas.core.kv.shipping import DIGEST_BYTES
from prfaas.core.transfer.residency import REGION, REGIONS_MAX, Regions
from prfaas.core.transfer.tickets import Ticket, TicketRefusal, TicketRefusedError
from prfaas.errors import ConfigError, PeerError
from prfaas.telemetry import TRACEPARENT, TRACEPARENT_CHARS
from prfaas.wire.allow_list import AllowList, admitted, regions_in
from prfaas.wire.identity import Identity
from prfaas.wire.messages.fields import TICKET_BYTES_MAX, Count, LayoutId, Name, TransferId
from prfaas.wire.name_authorities import NameAuthorities

_DOMAIN = b"prfaas ticket 1\0"
"""Keeps a signature on anything else from passing for one on a ticket."""
_ALGORITHM = ec.ECDSA(hashes.SHA256())
_CERTIFICATES_MAX = 4
_Signature = Annotated[bytes, msgspec.Meta(min_length=1, max_length=256)]
_Body = Annotated[bytes, msgspec.Meta(min_length=1, max_length=2048)]
_Trace = Annotated[
    str, msgspec.Meta(max_length=TRACEPARENT_CHARS, pattern=rf"^(?:{TRACEPARENT})?\Z")
]
_Region = Annotated[str, msgspec.Meta(pattern=REGION, max_length=32)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
_Der = Annotated[bytes, msgspec.Meta(min_length=1, max_length=3072)]


class _TicketSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A ticket's fields, with their limits."""

    transfer_id: TransferId
    tenant: Name
    layout_id: LayoutId
    source: Name
    destination: Name
    blocks: _Digest
    bytes_max: Count
    expires_at_ns: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    weight: Annotated[float, msgspec.Meta(ge=0.001, le=1000)] = 1.0
    bytes_per_s: Count = 0
    trace: _Trace = ""
    regions: Annotated[list[_Region], msgspec.Meta(max_length=REGIONS_MAX)] = []
    quality: Quality = Quality.LOSSLESS


class _Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """A ticket and its signer."""

    ticket: _Body
    signature: _Signature
    certificates: Annotated[list[_Der], msgspec.Meta(min_length=1, max_length=_CERTIFICATES_MAX)]


_encoder = msgspec.msgpack.Encoder()
_spec_decoder = msgspec.msgpack.Decoder(_TicketSpec)
_sealed_decoder = msgspec.msgpack.Decoder(_Sealed)


class TicketSigner:
    """Signs tickets with the identity of a gateway; ConfigError if the identity cannot be read, or
    its key is no elliptic-curve key."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self.renew()

    def renew(self) -> None:
        """Load the files and sign with them from now on.

        Raises:
            ConfigError: They cannot be read, or hold no elliptic-curve key; nothing is changed.
        """
        identity = self._identity
        try:
            key = serialization.load_pem_private_key(identity.key.read_bytes(), None)
            chain = x509.load_pem_x509_certificates(identity.certificate.read_bytes())
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"identity {identity.certificate} cannot sign tickets: {error}; "
                "make one with `prfaas identity`"
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or len(chain) > _CERTIFICATES_MAX:
            raise ConfigError(
                f"identity {identity.certificate} cannot sign tickets: that takes an "
                f"elliptic-curve key and at most {_CERTIFICATES_MAX} certificates; "
                "make one with `prfaas identity`"
            )
        self._key = key
        self._chain = [part.public_bytes(serialization.Encoding.DER) for part in chain]

    def seal(self, ticket: Ticket) -> bytes:
        """The ticket, signed; TICKET_BYTES_MAX bytes at most."""
        body = _encoder.encode(
            {name: getattr(ticket, name) for name in _TicketSpec.__struct_fields__}
        )
        signature = self._key.sign(_DOMAIN + body, _ALGORITHM)
        return _encoder.encode(_Sealed(ticket=body, signature=signature, certificates=self._chain))


class TicketOpener:
    """Reads tickets and sees that a gateway of the deployment signed them; ConfigError if the
    authority cannot be read.

    Args:
        authority: PEM file of the deployment's authority.
        gateways: Names of the gateways whose tickets are valid.
        more: Returns certificates of further authorities.
    """

    def __init__(
        self, authority: Path, gateways: Set[str], more: Callable[[], list[x509.Certificate]] = list
    ) -> None:
        self._authority, self._gateways, self._more = authority, gateways, more
        self.renew()

    def renew(self) -> None:
        """Trust the authorities that the file holds at this moment, and no others.

        Raises:
            ConfigError: It cannot be read; nothing is changed.
        """
        try:
            own = x509.load_pem_x509_certificates(self._authority.read_bytes())
            authorities = NameAuthorities.beside(self._authority)
            self._store = Store([*own, *authorities.others, *self._more()])
            self._authorities = authorities
        except (OSError, ValueError) as error:
            raise ConfigError(f"authority {self._authority} cannot be read: {error}") from None

    def open(self, data: bytes, now_ns: int) -> Ticket:
        """The ticket in `data`; what it allows is for the caller to check; TicketRefusedError if it
        is missing or malformed, or no gateway of ours signed it.

        Args:
            now_ns: Unix time, for the validity of certificates.
        """
        if not data:
            raise TicketRefusedError(TicketRefusal.MISSING, "there is none")
        if len(data) > TICKET_BYTES_MAX:
            raise TicketRefusedError(
                TicketRefusal.MALFORMED,
                f"it has {len(data)} bytes, the limit is {TICKET_BYTES_MAX}",
            )
        try:
            sealed = _sealed_decoder.decode(data)
            spec = _spec_decoder.decode(sealed.ticket)
            chain = [x509.load_der_x509_certificate(der) for der in sealed.certificates]
        except (
            msgspec.DecodeError,
            UnicodeDecodeError,
            ValueError,
            RecursionError,
            x509.InvalidVersion,
        ) as error:
            raise TicketRefusedError(TicketRefusal.MALFORMED, str(error)) from None
        signer, signer_regions = self._check_signer(sealed, chain, now_ns)
        fields = msgspec.structs.asdict(spec) | {"regions": frozenset(spec.regions)}
        return Ticket(**fields, signer=signer, signer_regions=signer_regions)

    def _check_signer(
        self, sealed: _Sealed, chain: list[x509.Certificate], now_ns: int
    ) -> tuple[str, Regions]:
        """Return the name of the signer, and the regions that it may sign for."""
        now = datetime.datetime.fromtimestamp(now_ns // 10**9, datetime.UTC)
        policy = PolicyBuilder().store(self._store).time(now)
        try:
            client = policy.build_client_verifier().verify(chain[0], chain[1:])
            subjects = client.subjects or ()
            names = [each.value for each in subjects if isinstance(each, x509.DNSName)]
            uris = [
                each.value for each in subjects if isinstance(each, x509.UniformResourceIdentifier)
            ]
            signer = admitted(names, uris, self._gateways)
            if signer is None:
                raise VerificationError(f"{sorted(names)} are not on {sorted(self._gateways)}")
            self._authorities.prove(signer, sealed.certificates[0])
            if isinstance(self._gateways, AllowList):
                self._gateways.prove(signer, sealed.certificates[0])
            key = chain[0].public_key()
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise VerificationError("its key is no elliptic-curve key")
            key.verify(sealed.signature, _DOMAIN + sealed.ticket, _ALGORITHM)
        except InvalidSignature:
            raise TicketRefusedError(
                TicketRefusal.UNKNOWN_SIGNER, "its signature is wrong"
            ) from None
        except (VerificationError, PeerError, ValueError, UnsupportedAlgorithm) as error:
            raise TicketRefusedError(TicketRefusal.UNKNOWN_SIGNER, str(error)) from None
        return signer, regions_in(uris)
