"""The contracts file of a pool node, followed while it runs, and the owners of tags."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from prfaas.config.governance.contracts import load_contracts
from prfaas.core.cache.tenant_shares import Share
from prfaas.core.kv.tenant_salts import tag_in
from prfaas.core.sharing.contracts import Contracts, TagOwners
from prfaas.errors import ConfigError
from prfaas.limited_files import read_limited
from prfaas.logs import log_event
from prfaas.membership.site_authorities import SiteAuthorities

log = logging.getLogger(__name__)

OWNERS_FILE = "tag-owners"
"""Beside the blocks on disk, so that they have an owner after a restart."""


class Agreements:
    """Contracts in force at a process, from a file that is read anew when it changes.

    Args:
        folder: Keeps the owners of tags over a restart; None without.
        check: Called with contracts before they are in force; raises `ConfigError` to refuse them.

    Raises:
        ConfigError: The file cannot be used.
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
        self._taken = self._seen = self._read()

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
        content, seen = self._read(), self._seen
        self._seen = content
        if content == self._taken or content != seen:
            return False
        self._taken = content
        try:
            self._load()
        except ConfigError as error:
            log_event(log, logging.ERROR, "contracts_kept", why=str(error))
            return False
        self._taken = self._seen = self._read()
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

    def _read(self) -> bytes:
        """Digest of the file and of the authorities that it names."""
        digest = hashlib.sha256()
        for path in self._paths:
            try:
                data = read_limited(path)
            except (OSError, ConfigError):
                data = b""
            digest.update(b"%d:" % len(data) + data)
        return digest.digest()

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
