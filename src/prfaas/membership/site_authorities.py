"""Authorities of the sites of contracts: which site a certificate was issued for.

A name of a site counts only in a certificate that the authority of this very site signed, and an
authority of a site proves no other name.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from prfaas.core.sharing.contracts import Contracts
from prfaas.errors import ConfigError, PeerError
from prfaas.wire.name_authorities import KNOWN_MAX, has_signed, read_authority

_DER = Encoding.DER
_KEY_FORMAT = _DER, PublicFormat.SubjectPublicKeyInfo


class SiteAuthorities:
    """Contracts in force, and the authorities of their sites. Any thread may ask."""

    def __init__(self) -> None:
        self.contracts = Contracts()
        self._authorities: dict[str, list[x509.Certificate]] = {}
        self._issuers: dict[bytes, str | None] = {}

    def replace(self, contracts: Contracts, files: Mapping[str, Path]) -> None:
        """Put contracts in force.

        Args:
            files: PEM file of the authority of each site.

        Raises:
            ConfigError: A file cannot be read, or two sites have one authority; nothing changes.
        """
        found = {site: read_authority(path) for site, path in files.items()}
        owners: dict[bytes, str] = {}
        for site, certificates in found.items():
            for each in certificates:
                key = each.public_key().public_bytes(*_KEY_FORMAT)
                if (other := owners.setdefault(key, site)) != site:
                    raise ConfigError(
                        f"contracts.{other} and contracts.{site} have one authority: each could "
                        "pass for the other; give every site an authority of its own"
                    )
        self.contracts, self._authorities, self._issuers = contracts, found, {}

    def site_of(self, name: str, der: bytes | None) -> str | None:
        """Site of a part that has proven a name; None if it is a part of this site itself.

        Args:
            name: In its certificate, which a trusted authority has signed.

        Raises:
            PeerError: The authority that signed it cannot prove this name.
        """
        issuer = self._issuer(der or b"")
        if issuer == self.contracts.site_of(name):
            return issuer
        raise PeerError(
            f"the certificate of {name} is signed by the authority of {issuer or 'no site'}, and "
            f"{name} is a part of {self.contracts.site_of(name) or 'no site'}"
        )

    def trust(self, *contexts: ssl.SSLContext) -> None:
        """Have contexts accept certificates of all sites; whose they are is decided later."""
        for certificates in self._authorities.values():
            for each in certificates:
                for context in contexts:
                    context.load_verify_locations(cadata=each.public_bytes(_DER))

    def keys_of(self, site: str) -> frozenset[bytes]:
        """Certificates of the authority of a site, DER."""
        return frozenset(each.public_bytes(_DER) for each in self._authorities.get(site, ()))

    @property
    def certificates(self) -> list[x509.Certificate]:
        """Certificates of all authorities."""
        return [each for found in self._authorities.values() for each in found]

    def _issuer(self, der: bytes) -> str | None:
        issuers = self._issuers
        if der not in issuers:
            if len(issuers) >= KNOWN_MAX:
                issuers.clear()
            issuers[der] = self._issued_by(der)
        return issuers[der]

    def _issued_by(self, der: bytes) -> str | None:
        try:
            leaf = x509.load_der_x509_certificate(der)
        except ValueError:
            return None
        for site, certificates in self._authorities.items():
            if any(has_signed(each, leaf) for each in certificates):
                return site
        return None
