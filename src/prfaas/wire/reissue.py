"""Renewal of identities on the machine with their authority's key, before they expire."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import ExtensionOID

from prfaas.core.transfer.residency import Regions
from prfaas.errors import ConfigError
from prfaas.wire.certificates import SOON
from prfaas.wire.identity import AUTHORITY, NAME, Identity, identity_in, issue
from prfaas.wire.regions import region_names, regions_in


def reissue(directory: Path, name: str, regions: Regions | None = None) -> Identity:
    """Give an identity a new certificate and a new key, with the addresses it has.

    Each file is replaced as a whole. Processes use the old contents until they are asked to read
    again (SIGHUP).

    Args:
        directory: Holds `ca.pem` and `ca.key`.
        name: Name in the deployment file.
        regions: Regions that it names from now on; None keeps them.

    Raises:
        ConfigError: There is no such identity or no authority here, or they cannot be read.
    """
    identity = identity_in(directory, name)
    further = _further(identity, name)
    if regions is not None:
        further = [each for each in further if not regions_in([str(each.value)])]
        further += region_names(regions)
    certificate, key = issue(directory, name, further)
    for path, data, mode in (
        (identity.key, key, 0o600),
        (identity.certificate, certificate, 0o644),
    ):
        draft = path.with_name(f"{path.name}.draft")
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        draft.replace(path)
    return identity


def renew_due(directory: Path, names: Iterable[str], now: datetime.datetime) -> list[Identity]:
    """Reissue those of identities that end within `SOON` of now; returns them.

    Raises:
        ConfigError: The authority cannot be read.
    """
    return [
        reissue(directory, name) for name in names if _is_due(identity_in(directory, name), now)
    ]


def names_in(directory: Path) -> list[str]:
    """Names of the identities in a directory."""
    return sorted(
        path.stem
        for path in directory.glob("*.key")
        if path.stem != AUTHORITY and NAME.fullmatch(path.stem)
    )


def _is_due(identity: Identity, now: datetime.datetime) -> bool:
    """Return True if its own certificate ends soon; unreadable files are not replaced."""
    try:
        leaf = x509.load_pem_x509_certificates(identity.certificate.read_bytes())[0]
    except (OSError, ValueError):
        return False
    return leaf.not_valid_after_utc < now + SOON


def _further(identity: Identity, name: str) -> list[x509.GeneralName]:
    """Names of a certificate beside the identity's own."""
    try:
        leaf = x509.load_pem_x509_certificates(identity.certificate.read_bytes())[0]
        found = leaf.extensions.get_extension_for_oid(ExtensionOID.SUBJECT_ALTERNATIVE_NAME).value
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise ConfigError(
            f"{identity.certificate} cannot be renewed: {error}; make it with "
            f"`prfaas identity {name}`"
        ) from None
    own = x509.DNSName(name)
    names = list(found) if isinstance(found, x509.SubjectAlternativeName) else []
    if own not in names:
        raise ConfigError(f"{identity.certificate} is not of {name}; it is not changed")
    return [each for each in names if each != own]
