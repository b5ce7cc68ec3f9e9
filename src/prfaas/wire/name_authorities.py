"""Authorities of names: which name a certificate proves, where several authorities are trusted.

Each of them can sign any name. So a name counts only in a certificate of its own authority. The
files of the identities name the authorities:

    IDENTITIES/ca.pem              the authority of this site
    IDENTITIES/ENTRY.ca.pem        another authority, for names that match ENTRY, and no others

ENTRY is the name of a part, or the host name or address of an engine; `*` stands for any
characters. A name that matches an entry counts only in a certificate of that authority, and every
other name, such as that of a gateway of this site, only in one of `ca.pem`. A certificate of
`ca.pem` that is also in an entry proves the names of the entry alone. At a site with contracts
these name the authorities (`membership/agreements.py`).
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding

from prfaas.errors import ConfigError, PeerError

SUFFIX = ".ca.pem"
_OWN = ""
KNOWN_MAX = 4096
"""Certificates whose issuer is remembered: a signature takes 0.1 ms to verify."""


class Issuers:
    """The authorities that signed a certificate. Any thread may ask.

    Args:
        authorities: Certificates of each, by a name for it.
    """

    def __init__(self, authorities: Mapping[str, Sequence[x509.Certificate]]) -> None:
        self._authorities = authorities
        self._known: dict[bytes | None, frozenset[str]] = {}

    def of(self, der: bytes | None) -> frozenset[str]:
        """Names of the authorities that signed a certificate, DER."""
        known = self._known
        if der not in known:
            if len(known) >= KNOWN_MAX:
                known.clear()
            known[der] = self._signed_by(der)
        return known[der]

    def _signed_by(self, der: bytes | None) -> frozenset[str]:
        try:
            leaf = x509.load_der_x509_certificate(der or b"")
        except ValueError:
            return frozenset()
        return frozenset(
            name
            for name, certificates in self._authorities.items()
            if any(_has_signed(each, leaf) for each in certificates)
        )


class NameAuthorities:
    """Authorities of one directory, as they were read. Any thread may ask.

    Args:
        own: Certificates of `ca.pem`.
    """

    def __init__(
        self, own: Sequence[x509.Certificate], others: dict[str, list[x509.Certificate]]
    ) -> None:
        self.others = [each for found in others.values() for each in found]
        foreign = {each.public_bytes(Encoding.DER) for each in self.others}
        ours = [each for each in own if each.public_bytes(Encoding.DER) not in foreign]
        self._authorities = {**others, _OWN: ours} if others else {}
        self._issuers = Issuers(self._authorities)

    @classmethod
    def beside(cls, authority: Path) -> NameAuthorities:
        """Read the authorities beside `ca.pem`; ConfigError if a file cannot be read."""
        files = sorted(authority.parent.glob(f"*{SUFFIX}"))
        if not files:
            return cls((), {})
        others = {path.name.removesuffix(SUFFIX): read_authority(path) for path in files}
        return cls(read_authority(authority), others)

    def prove(self, name: str, der: bytes | None) -> None:
        """See that the authority of a certificate can prove a name; PeerError if it cannot.

        Args:
            name: Name of a part, or host name or address of an engine.
            der: The certificate, which a trusted authority has signed.
        """
        if not self._authorities:
            return
        entries = {entry for entry in self._authorities if entry and fnmatchcase(name, entry)}
        wanted, issuers = entries or {_OWN}, self._issuers.of(der)
        if not wanted & issuers:
            files = ", ".join(f"{entry}{SUFFIX}" for entry in sorted(wanted) if entry)
            raise PeerError(
                f"the certificate of {name} is not signed by an authority of {files or 'this site'}"
                f", and that of {', '.join(sorted(filter(None, issuers))) or 'ca.pem'} cannot "
                "prove this name"
            )

    def trust(self, context: ssl.SSLContext) -> None:
        """Have a context accept their certificates; whose they are is decided later."""
        for each in self.others:
            context.load_verify_locations(cadata=each.public_bytes(Encoding.DER))


class NamedContext(ssl.SSLContext):
    """A context with the authorities of names; `wire/identity.py` asks them about each peer."""

    authorities = NameAuthorities((), {})


class HostObject(ssl.SSLObject):
    """An end of a connection to a host: after the handshake its authority has to prove the name."""

    def do_handshake(self) -> None:
        """Do the TLS handshake.

        Raises:
            ssl.SSLCertVerificationError: The authority cannot prove the name of the host.
        """
        super().do_handshake()
        context = self.context
        if isinstance(context, NamedContext) and self.server_hostname:
            try:
                context.authorities.prove(self.server_hostname, self.getpeercert(binary_form=True))
            except PeerError as error:
                raise ssl.SSLCertVerificationError(str(error)) from None


def _has_signed(authority: x509.Certificate, leaf: x509.Certificate) -> bool:
    try:
        leaf.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def peer_certificate(ssl_object: ssl.SSLObject | ssl.SSLSocket | None) -> bytes | None:
    """The certificate of the peer of an established connection, DER."""
    return ssl_object.getpeercert(binary_form=True) if ssl_object is not None else None


def read_authority(path: Path) -> list[x509.Certificate]:
    """Read the certificates of an authority, PEM; ConfigError if the file cannot be read."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"authority {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"authority {path} is no PEM file: {error}") from None
