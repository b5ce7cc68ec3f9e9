"""Faults of the files of an identity, with the next step, and their renewal before they expire."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.x509.oid import ExtensionOID

from prfaas.core.transfer.residency import Regions
from prfaas.errors import ConfigError
from prfaas.wire.allow_list import region_names, regions_in
from prfaas.wire.identity import AUTHORITY, NAME, Identity, identity_in, issue

SOON = datetime.timedelta(days=30)
"""A certificate that ends before that is told of."""
_HOW = "see docs/operations.md for a change while requests run"


def faults(identity: Identity, name: str, now: datetime.datetime) -> Iterator[str]:
    """Return the reasons for which peers would refuse this identity; none if it is valid or
    missing.

    Args:
        name: Name in the deployment file, which has to be in the certificate.
        now: With its time zone.
    """
    try:
        chain = x509.load_pem_x509_certificates(identity.certificate.read_bytes())
        authorities = x509.load_pem_x509_certificates(identity.authority.read_bytes())
    except OSError:
        return
    except ValueError as error:
        yield f"{identity.certificate} or {identity.authority} is no PEM file: {error}"
        return
    try:
        identity.client_context()
    except ConfigError as error:
        yield str(error)
    names = _names(chain[0])
    if name not in names:
        yield (
            f"{identity.certificate} is of {', '.join(names) or 'nobody'}, and not of {name}: "
            f"make one with `prfaas identity {name}`"
        )
    issuers = [each for each in [*chain[1:], *authorities] if _issued(chain[0], each)]
    if not issuers:
        yield (
            f"{identity.certificate} is not signed by an authority in {identity.authority}: copy "
            "both from the machine that created them; all sites need the same ca.pem"
        )
    yield from _out_of_time(str(identity.certificate), chain[0], now)
    if issuers and not any(_holds(each, now) for each in issuers):
        yield from _out_of_time(str(identity.authority), issuers[0], now)


def ends_soon(identity: Identity, now: datetime.datetime) -> Iterator[str]:
    """A line if the identity, or its authority, ends within `SOON`.

    Args:
        now: With its time zone.
    """
    end = ends_at(identity)
    if end is not None and now <= end < now + SOON:
        days = (end - now).days
        yield f"{identity.certificate} or its authority ends on {_day(end)}, in {days} days: {_HOW}"


def ends_at(identity: Identity) -> datetime.datetime | None:
    """Return the end of the identity or of its last authority; None if it cannot be read."""
    try:
        leaf = x509.load_pem_x509_certificates(identity.certificate.read_bytes())[0]
        authorities = x509.load_pem_x509_certificates(identity.authority.read_bytes())
    except (OSError, ValueError):
        return None
    ends = [each.not_valid_after_utc for each in authorities if _issued(leaf, each)]
    return min([leaf.not_valid_after_utc, *([max(ends)] if ends else [])])


def _out_of_time(
    place: str, certificate: x509.Certificate, now: datetime.datetime
) -> Iterator[str]:
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end:
        yield f"{place} ended on {_day(end)}, it is {_day(now)}: make a new one; {_HOW}"
    if now < start:
        yield (
            f"{place} holds from {_day(start)} on, it is {_day(now)}: set the clock of this "
            "machine, or of the one that created it"
        )


def _holds(certificate: x509.Certificate, now: datetime.datetime) -> bool:
    return certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc


def _issued(leaf: x509.Certificate, by: x509.Certificate) -> bool:
    try:
        leaf.verify_directly_issued_by(by)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def _names(certificate: x509.Certificate) -> list[str]:
    try:
        found = certificate.extensions.get_extension_for_oid(
            ExtensionOID.SUBJECT_ALTERNATIVE_NAME
        ).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return (
        found.get_values_for_type(x509.DNSName)
        if isinstance(found, x509.SubjectAlternativeName)
        else []
    )


def _day(when: datetime.datetime) -> str:
    return when.strftime("%Y-%m-%d %H:%M UTC")


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
    """Reissue those of identities that end within `SOON` of now; returns them; ConfigError if the
    authority cannot be read."""
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
