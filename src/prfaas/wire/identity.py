"""Identities of peers: mutual TLS between gateways, pools and engines.

Every process that crosses a site boundary has an identity: a certificate whose DNS name is the
process's name in the deployment file, signed by the deployment's own authority. A peer is admitted
only if the authority signed it and its name, or its site, is on the list.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import ssl
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from prfaas.errors import ConfigError, PeerError
from prfaas.wire.allow_list import AllowList, admitted, region_names, site_uri
from prfaas.wire.name_authorities import HostObject, NameAuthorities, NamedContext

VALID_DAYS = 90
"""Validity of an identity.

There is no revocation: a stolen key is usable until its certificate expires.
"""
AUTHORITY_DAYS = 1825
"""Validity of an authority, whose change affects every host; its key is on a single machine."""
AUTHORITY = "ca"
NAME = re.compile(r"[a-z][a-z0-9-]{0,62}")
"""Form of the names of parts in a deployment file."""
HOST_NAME = re.compile(r"[A-Za-z0-9*_-]+(\.[A-Za-z0-9_-]+)*")
DATA_PROTOCOL = "prfaas-blocks/1"
"""ALPN name of data connections, for the listener."""
PROBE_PROTOCOL = "prfaas-probe/1"
"""ALPN name of the connections of a link test."""


@dataclass(frozen=True, slots=True)
class LinkContexts:
    """Files and contexts of one end of a link."""

    messages: ssl.SSLContext
    """For connections that carry messages."""
    data: ssl.SSLContext
    """For connections that carry pieces of blocks; their handshake names DATA_PROTOCOL."""
    probe: ssl.SSLContext
    """For connections of a link test; their handshake names PROBE_PROTOCOL."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Files of one identity. Only the key is secret."""

    authority: Path
    certificate: Path
    key: Path

    def server_context(self) -> ssl.SSLContext:
        """TLS 1.3 for accepting: a client without a certificate of ours is refused; ConfigError if
        a file is missing or does not fit the others."""
        context = NamedContext(ssl.PROTOCOL_TLS_SERVER)
        return self._load(context)

    def client_context(self) -> ssl.SSLContext:
        """TLS 1.3 for dialling. The peer's name is checked by `peer_name`, not by host name.

        Raises:
            ConfigError: A file is missing or does not fit the others.
        """
        context = NamedContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        return self._load(context)

    def host_context(self) -> ssl.SSLContext:
        """TLS 1.3 for dialling hosts, such as engines: the peer's host name is checked; ConfigError
        if a file is missing or does not fit the others."""
        context = self.client_context()
        context.check_hostname, context.sslobject_class = True, HostObject
        return context

    def accepting(self) -> LinkContexts:
        """Context of the accepting end of links; ConfigError if a file is missing or does not fit
        the others.

        Data connections and probes get no session tickets: the other end does not read, and
        unread bytes turn an orderly end of a connection into a reset.
        """
        contexts = self.server_context(), self.server_context(), self.server_context()
        return _for_link(*contexts)

    def dialling(self) -> LinkContexts:
        """Context of the dialling end of links; ConfigError if a file is missing or does not fit
        the others."""
        contexts = self.client_context(), self.client_context(), self.client_context()
        return _for_link(*contexts)

    def refresh(self, *contexts: ssl.SSLContext) -> None:
        """Load the files into the contexts; existing connections continue.

        An authority removed from `ca.pem` stays trusted: a context cannot remove one. No
        other thread may use the contexts meanwhile.

        Raises:
            ConfigError: A file is missing or does not fit the others; nothing is changed.
        """
        self.client_context()
        for context in contexts:
            self._load(context)

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(self.authority)
            if isinstance(context, NamedContext):
                context.authorities = NameAuthorities.beside(self.authority)
                context.authorities.trust(context)
            # Without a password OpenSSL would ask for one at the terminal, and wait.
            context.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"identity {self.certificate} cannot be used: {error}; "
                "make one with `prfaas identity`"
            ) from None
        return context


def _for_link(
    messages: ssl.SSLContext, data: ssl.SSLContext, probe: ssl.SSLContext
) -> LinkContexts:
    for context, protocol in ((data, DATA_PROTOCOL), (probe, PROBE_PROTOCOL)):
        context.set_alpn_protocols([protocol])
        if context.protocol is ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0
    return LinkContexts(messages, data, probe)


def identity_in(directory: Path, name: str) -> Identity:
    """Return the paths of the files that `make_identity` creates for `name`."""
    return Identity(directory / "ca.pem", directory / f"{name}.pem", directory / f"{name}.key")


def peer_name(ssl_object: ssl.SSLObject | ssl.SSLSocket | None, allowed: Set[str]) -> str:
    """Name of the peer of an established connection; `allowed` as in `wire/allow_list.py`.

    Raises:
        PeerError: There is no certificate, its name is not in `allowed`, or it cannot prove it.
    """
    certificate = ssl_object.getpeercert() if ssl_object is not None else None
    entries = (certificate or {}).get("subjectAltName", ())
    names = [str(entry[1]) for entry in entries if entry[0] == "DNS"]
    uris = [str(entry[1]) for entry in entries if entry[0] == "URI"]
    if (name := admitted(names, uris, allowed)) is not None:
        _prove(name, ssl_object, allowed)
        return name
    raise PeerError(
        f"the peer is {', '.join([*names, *uris]) or 'without a name'}, expected "
        f"{' or '.join(sorted(allowed)) or 'nobody'}"
    )


def _prove(name: str, peer: ssl.SSLObject | ssl.SSLSocket | None, allowed: Set[str]) -> None:
    """See that the authority of a peer can prove its name, here and by the contracts of sites."""
    if peer is None:
        return
    der, context = peer.getpeercert(binary_form=True), peer.context
    if isinstance(context, NamedContext):
        context.authorities.prove(name, der)
    if isinstance(allowed, AllowList):
        allowed.prove(name, der)


def make_authority(directory: Path) -> None:
    """Create `ca.pem` and `ca.key` in `directory`, unless they are there."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if (directory / "ca.pem").exists():
        return
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "prfaas deployment authority")])
    certificate = (
        _builder(name, name, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(False, False, False, False, False, True, True, False, False),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(directory / "ca.key", _private_bytes(key), 0o600)
    _write(directory / "ca.pem", certificate.public_bytes(serialization.Encoding.PEM), 0o644)


def check_name(name: str) -> None:
    """See that a part can have this name; ConfigError if it cannot, and no file may be named after
    it."""
    if not NAME.fullmatch(name) or name == AUTHORITY:
        raise ConfigError(
            f"{name!r} cannot be the name of an identity: names are lower-case letters, digits "
            f"and dashes, start with a letter, have 63 characters at most and are not {AUTHORITY!r}"
        )


def make_identity(
    directory: Path,
    name: str,
    addresses: list[str] | None = None,
    site: str = "",
    regions: Iterable[str] = (),
) -> Identity:
    """Create the identity of `name` with the authority in `directory`, unless it is there.

    Args:
        directory: Holds `ca.pem` and `ca.key`.
        name: Name in the deployment file.
        addresses: Further host names or IP addresses that the process is reached at, for servers
            whose clients check host names (vLLM behind `https`).
        site: Its site and kind, as in "pd/pool"; "" leaves them out.
        regions: Of a pool, where its blocks rest; of a gateway, those that it may sign for.

    Raises:
        ConfigError: The authority's files are not there, or are no PEM files of ours; no part can
            have this name, or no certificate this address.
    """
    check_name(name)
    further = [_alt_name(address) for address in addresses or []]
    if site:
        further.append(x509.UniformResourceIdentifier(site_uri(site, name)))
    further += region_names(regions)
    identity = identity_in(directory, name)
    if identity.certificate.exists() and identity.key.exists():
        return identity
    certificate, key = issue(directory, name, further)
    _write(identity.key, key, 0o600)
    _write(identity.certificate, certificate, 0o644)
    return identity


def issue(directory: Path, name: str, further: Sequence[x509.GeneralName]) -> tuple[bytes, bytes]:
    """A new certificate and its new key, PEM; nothing is written.

    Args:
        directory: Holds `ca.pem` and `ca.key`.
        name: Name in the deployment file.
        further: What else the process is called, for clients that check host names.

    Raises:
        ConfigError: The authority's files are not there, or are no PEM files of ours.
    """
    identity = identity_in(directory, name)
    try:
        authority = x509.load_pem_x509_certificate(identity.authority.read_bytes())
        loaded = serialization.load_pem_private_key((directory / "ca.key").read_bytes(), None)
    except OSError as error:
        raise ConfigError(f"no authority in {directory}: {error}") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"ca.pem and ca.key in {directory} cannot be read as an authority: {error}; "
            "name another directory, or remove both to make a new one"
        ) from None
    if not isinstance(loaded, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{directory / 'ca.key'} is not an elliptic-curve key")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _builder(subject, authority.subject, key.public_key(), VALID_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name), *further]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(loaded.public_key()), critical=False
        )
        .sign(loaded, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM), _private_bytes(key)


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _alt_name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        pass
    if not HOST_NAME.fullmatch(address):
        raise ConfigError(f"{address!r} is neither an IP address nor a host name in ASCII")
    return x509.DNSName(address)


def _private_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
