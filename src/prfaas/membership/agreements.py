"""The contracts file of a pool node, followed while it runs: owners of tags, authorities of sites.

A name of a site counts only in a certificate that the authority of this very site signed, and an
authority of a site proves no other name.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from prfaas.config.governance.contracts import load_contracts
from prfaas.core.admission.contracts import Contracts, TagOwners
from prfaas.core.cache.tenant_shares import Share
from prfaas.core.kv.tenant_salts import tag_in
from prfaas.errors import ConfigError, PeerError
from prfaas.limited_files import digest_of, read_limited
from prfaas.logs import log_event
from prfaas.wire.name_authorities import Issuers, read_authority

log = logging.getLogger(__name__)


_DER = Encoding.DER
_KEY_FORMAT = _DER, PublicFormat.SubjectPublicKeyInfo


class SiteAuthorities:
    """Contracts in force, and the authorities of their sites. Any thread may ask."""

    def __init__(self) -> None:
        self.contracts = Contracts()
        self._authorities: dict[str, list[x509.Certificate]] = {}
        self._issuers = Issuers({})

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
        self.contracts, self._authorities = contracts, found
        self._issuers = Issuers(found)

    def site_of(self, name: str, der: bytes | None) -> str | None:
        """Site of a part that has proven a name; None if it is a part of this site itself;
        PeerError if the authority that signed it cannot prove this name.

        Args:
            name: In its certificate, which a trusted authority has signed.
        """
        issuer = next(iter(self._issuers.of(der)), None)
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


OWNERS_FILE = "tag-owners"
"""Beside the blocks on disk, so that they have an owner after a restart."""


class Agreements:
    """Contracts in force at a process, from a file that is read anew when it changes; ConfigError
    if the file cannot be used.

    Args:
        folder: Keeps the owners of tags over a restart; None without.
        check: Called with contracts before they are in force; raises `ConfigError` to refuse them.
    """

    def __init__(
        self,
        path: Path,
        folder: Path | None = None,
        check: Callable[[Contracts], None] = lambda _: None,
    ) -> None:
        self._path, self._check = path, check
        self._owners_file = folder / OWNERS_FILE if folder is not None else None
        self.authorities = SiteAuthorities()
        self.owners = TagOwners(self._kept())
        self._paths = [path]
        self._load()
        self._taken = self._seen = digest_of(self._paths)

    @property
    def contracts(self) -> Contracts:
        """Those in force."""
        return self.authorities.contracts

    @property
    def shares(self) -> Mapping[str, Share]:
        """Shares of memory by site."""
        return {site: each.memory for site, each in self.contracts.by_site.items()}

    def look(self) -> bool:
        """Read the file if it changed; return True if other contracts are in force.

        Two looks have to find the same change: a file that is being written has no contracts yet.
        One that cannot be used changes nothing, and is logged.
        """
        content, seen = digest_of(self._paths), self._seen
        self._seen = content
        if content == self._taken or content != seen:
            return False
        self._taken = content
        try:
            self._load()
        except ConfigError as error:
            log_event(log, logging.ERROR, "contracts_kept", why=str(error))
            return False
        self._taken = self._seen = digest_of(self._paths)
        log_event(log, logging.WARNING, "contracts_changed", sites=sorted(self.contracts.by_site))
        return True

    def claim(self, tag: str, site: str) -> bool:
        """Use a tag for a site; see `TagOwners.claim`."""
        is_new = self.owners[tag] is None
        if not self.owners.claim(tag, site):
            return False
        if is_new and self._owners_file is not None:
            # Where it cannot be written, its blocks on disk are nobody's after a restart.
            with contextlib.suppress(OSError), self._owners_file.open("a") as file:
                file.write(f"{tag} {site}\n")
        return True

    def _load(self) -> None:
        file = load_contracts(self._path)
        files = file.authorities()
        contracts = Contracts(file.agreed())
        self._check(contracts)
        self.authorities.replace(contracts, files)
        self._paths = [self._path, *files.values()]

    def _kept(self) -> dict[str, str]:
        if self._owners_file is None:
            return {}
        self._owners_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            lines = read_limited(self._owners_file).decode().splitlines()
        except (OSError, ConfigError, UnicodeDecodeError):
            return {}
        pairs = (line.split(" ") for line in lines if line.count(" ") == 1)
        return {tag: site for tag, site in pairs if tag_in(tag)}
