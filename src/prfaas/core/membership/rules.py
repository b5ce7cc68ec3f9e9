"""The rules by which a site accepts listed members: incumbents first, then by name."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from urllib.parse import urlsplit

from prfaas.core.membership.members import (
    Listed,
    Member,
    MemberKind,
    RefusalCause,
    RefusedEntry,
    Site,
)

_KINDS = {kind: number for number, kind in enumerate(MemberKind)}


def accepted(
    listed: Iterable[Listed], incumbents: Mapping[str, Member], site: Site
) -> tuple[dict[str, Listed], list[RefusedEntry]]:
    """Divide the entries of all sources into members and refusals.

    An incumbent keeps its name and address against newcomers, so that a wrong entry harms nobody.

    Args:
        listed: Entries of all sources.
        incumbents: Members that have joined, by name.
        site: What they have to agree with.

    Returns:
        Accepted entries by name, pool nodes first, and the refusals.
    """

    def rank(each: Listed) -> tuple[int, bool, str, str]:
        member = each.member
        is_new = incumbents.get(member.name) != member
        return _KINDS[member.kind], is_new, member.name, member.address

    found: dict[str, Listed] = {}
    holders: dict[str, str] = {}
    counts: Counter[MemberKind] = Counter()
    refused: list[RefusedEntry] = []
    for each in sorted(listed, key=rank):
        member = each.member
        # Parts that a gateway was started with may share an address.
        holder = holders.get(member.address) if incumbents.get(member.name) != member else None
        refusal = _contradiction(member, found, holder, counts, site)
        if refusal is None:
            found[member.name] = each
            holders[member.address] = member.name
            counts[member.kind] += 1
        else:
            refused.append(RefusedEntry(member.name, *refusal))
    return found, refused


def _contradiction(
    member: Member,
    found: Mapping[str, Listed],
    holder: str | None,
    counts: Counter[MemberKind],
    site: Site,
) -> tuple[RefusalCause, str] | None:
    if member.cluster not in site.clusters:
        return RefusalCause.UNKNOWN_CLUSTER, _unknown("cluster", member.cluster, site.clusters)
    if (known := found.get(member.name)) is not None:
        place = known.member.address
        return RefusalCause.DUPLICATE_NAME, f"{place} has this name already; names are identities"
    if holder is not None:
        return (
            RefusalCause.ADDRESS_TAKEN,
            f"{member.address} is the address of {holder}; give its own",
        )
    if member.kind is MemberKind.ENGINE and (odd := odd_engine(member, found, site)) is not None:
        return odd
    most = site.limits[member.kind]
    if counts[member.kind] >= most:
        return (
            RefusalCause.TOO_MANY,
            f"there are {most} members of kind {member.kind.value} already",
        )
    return None


def without_identity(member: Member) -> RefusedEntry | None:
    """The refusal of an engine of another machine that proves no name; None if it does."""
    url = urlsplit(member.address)
    if (
        member.kind is not MemberKind.ENGINE
        or url.scheme == "https"
        or _is_local(url.hostname or "")
    ):
        return None
    return RefusedEntry(
        member.name,
        RefusalCause.NO_IDENTITY,
        f"{member.address} has no identity: whoever answers there would get prompts and cache "
        "salts; give it a certificate and an https URL, name it in the deployment file, or set "
        'membership.identity to "none"',
    )


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def odd_engine(
    member: Member, found: Mapping[str, Listed], site: Site
) -> tuple[RefusalCause, str] | None:
    """The contradiction of an engine to its site and its pool node; None without one."""
    roles, pool = site.clusters[member.cluster], found.get(member.pool)
    if member.role not in roles:
        return RefusalCause.UNKNOWN_ROLE, _unknown("role", member.role, roles)
    if pool is None or pool.member.kind is not MemberKind.POOL:
        words = f"its pool node {member.pool!r} is no member; list the pool node as well"
        return RefusalCause.UNKNOWN_POOL, words
    if pool.member.cluster != member.cluster:
        words = f"its pool node {member.pool!r} belongs to cluster {pool.member.cluster}"
        return RefusalCause.UNKNOWN_POOL, words
    if member.model and member.model != site.model:
        return (
            RefusalCause.OTHER_MODEL,
            f"it serves {member.model!r}, the site serves {site.model!r}",
        )
    return None


def _unknown(what: str, value: str, known: Collection[str]) -> str:
    return f"{what} {value!r} is not one of {', '.join(known)}"
