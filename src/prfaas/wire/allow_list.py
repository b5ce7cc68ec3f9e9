"""Allow-lists of peers: exact names, and patterns over the sites that identities name.

An identity can carry its site as a URI beside its DNS name: `spiffe://prfaas/site/pd/pool/pd-a` is
the part `pd-a`, a pool of site `pd`. The entry `site/pd/pool/*` of an allow-list admits every pool
of that site. A part of an entry is a name, or a prefix and `*`.

`spiffe://prfaas/region/eu` is a region. A pool's certificate names its footprint: every region
where its blocks rest. A gateway's names the regions that its tickets may allow. Only the authority
of a deployment can put them there.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from functools import lru_cache
from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import ExtensionOID

from prfaas.core.transfer.residency import REGIONS_MAX, Regions, check_region
from prfaas.errors import ConfigError

TRUST_DOMAIN = "spiffe://prfaas/"
PATTERN = re.compile(r"site(/([a-z][a-z0-9-]{0,62}\*?|\*)){3}")
_NAME = r"[a-z0-9-]*"


class AllowList(Set[str]):
    """An allow-list that changes while connections are accepted; any thread may read it.

    Args:
        prove: Called with a name and the certificate (DER) of each peer that is admitted; raises
            `PeerError` if the certificate cannot prove the name.
    """

    def __init__(
        self,
        entries: Iterable[str] = (),
        prove: Callable[[str, bytes | None], object] = lambda *_: None,
    ) -> None:
        self._entries = frozenset(entries)
        self.prove = prove

    def replace(self, entries: Iterable[str]) -> None:
        """Admit these from now on; connections that stand stay."""
        self._entries = frozenset(entries)

    def __contains__(self, entry: object) -> bool:
        return entry in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @classmethod
    def _from_iterable(cls, entries: Iterable[str]) -> frozenset[str]:  # type: ignore[override]
        """The union of two lists, as they are now."""
        return frozenset(entries)


def site_uri(site: str, name: str) -> str:
    """The URI of a part; ConfigError if it is not SITE/KIND.

    Args:
        site: Site and kind of the part, as in "pd/pool".
    """
    entry = f"site/{site}/{name}"
    if PATTERN.fullmatch(entry) is None or "*" in entry:
        raise ConfigError(
            f"{site!r} is no site and kind of a part; give SITE/KIND in lower-case letters, digits "
            "and dashes, as in pd/pool"
        )
    return TRUST_DOMAIN + entry


def check_entries(entries: Iterable[str]) -> None:
    """See that all patterns of an allow-list have the right form; ConfigError if one has not."""
    for entry in entries:
        if "/" in entry and PATTERN.fullmatch(entry) is None:
            raise ConfigError(
                f"{entry!r} is neither a name nor site/SITE/KIND/NAME; each of the three can be a "
                "prefix and *, as in site/pd/pool/*"
            )


def admitted(names: Sequence[str], uris: Sequence[str], allowed: Collection[str]) -> str | None:
    """Name under which an allow-list admits a certificate; None if it does not.

    Args:
        names: DNS names of the certificate.
        uris: URIs of the certificate. The last part of one counts only if it is also a DNS name.
    """
    for name in names:
        if name in allowed:
            return name
    patterns = [_compiled(entry) for entry in allowed if "/" in entry] if uris else []
    for uri in uris:
        name = uri.rpartition("/")[2]
        if name in names and any(pattern.fullmatch(uri) for pattern in patterns):
            return name
    return None


@lru_cache(maxsize=1024)
def _compiled(entry: str) -> re.Pattern[str]:
    return re.compile(re.escape(TRUST_DOMAIN + entry).replace(r"\*", _NAME))


PREFIX = f"{TRUST_DOMAIN}region/"


def region_names(regions: Iterable[str]) -> list[x509.GeneralName]:
    """Names for the certificate of a part; ConfigError if one is no region, or there are too
    many."""
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
