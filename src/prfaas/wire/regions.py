"""Regions in certificates: URIs beside the DNS name and the site.

    spiffe://prfaas/region/eu

A pool's certificate names its footprint: every region where its blocks rest. A gateway's names the
regions that its tickets may allow. Only the authority of a deployment can put them there.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import ExtensionOID

from prfaas.core.transfer.residency import REGIONS_MAX, Regions, check_region
from prfaas.errors import ConfigError
from prfaas.wire.allow_list import TRUST_DOMAIN

PREFIX = f"{TRUST_DOMAIN}region/"


def region_names(regions: Iterable[str]) -> list[x509.GeneralName]:
    """Names for the certificate of a part.

    Raises:
        ConfigError: One is no region, or there are too many.
    """
    found = sorted(set(regions))
    if len(found) > REGIONS_MAX:
        raise ConfigError(f"{len(found)} regions; a certificate has at most {REGIONS_MAX}")
    for region in found:
        check_region(region)
    return [x509.UniformResourceIdentifier(PREFIX + region) for region in found]


def regions_in(uris: Iterable[str]) -> Regions:
    """Regions that URIs of a certificate name."""
    return frozenset(uri.removeprefix(PREFIX) for uri in uris if uri.startswith(PREFIX))


def peer_regions(ssl_object: ssl.SSLObject | ssl.SSLSocket | None) -> Regions:
    """Regions in the certificate of the peer of an established connection."""
    certificate = (ssl_object.getpeercert() if ssl_object is not None else None) or {}
    entries = certificate.get("subjectAltName", ())
    return regions_in(str(entry[1]) for entry in entries if entry[0] == "URI")


def regions_of(certificate: Path) -> Regions:
    """Regions in the first certificate of a PEM file; none if it cannot be read."""
    try:
        leaf = x509.load_pem_x509_certificates(certificate.read_bytes())[0]
        names = leaf.extensions.get_extension_for_oid(ExtensionOID.SUBJECT_ALTERNATIVE_NAME).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return frozenset()
    if not isinstance(names, x509.SubjectAlternativeName):
        return frozenset()
    return regions_in(names.get_values_for_type(x509.UniformResourceIdentifier))


def wrong_regions(certificate: Path, name: str, wanted: Regions) -> str:
    """Reason for which a certificate does not fit the regions of its part; "" if it does.

    Args:
        wanted: Its regions by the deployment file; without any, the certificate may name some.
    """
    found = regions_of(certificate)
    if not wanted or found == wanted:
        return ""
    options = " ".join(f"--region {region}" for region in sorted(wanted))
    return (
        f"{certificate} names {_listed(found)}, and the deployment file puts {name} into "
        f"{_listed(wanted)}: renew it with `prfaas identity {name} --renew {options}`"
    )


def _listed(regions: Regions) -> str:
    return f"the regions {', '.join(sorted(regions))}" if regions else "no region"
