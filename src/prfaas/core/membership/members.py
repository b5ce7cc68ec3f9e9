"""Members as sources list them, and the reasons for which a site refuses one.

The rules by which a site accepts listed members: incumbents first, then by name.

Links between the pools of engines that come and go.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import permutations, product
from urllib.parse import urlsplit


class MemberKind(StrEnum):
    """Kind of a member."""

    POOL = "pool"
    ENGINE = "engine"
    GATEWAY = "gateway"


class State(StrEnum):
    """State of a member."""

    SEEN = "seen"
    """It is listed, and gets no work yet: it is not ready, or waits for its predecessor."""
    READY = "ready"
    DRAINING = "draining"
    """It gets nothing new; what it has goes on."""
    GONE = "gone"
    REFUSED = "refused"
    """It contradicts the site or another member."""


class RefusalCause(StrEnum):
    """Reason of a refusal; labels a metric."""

    DUPLICATE_NAME = "duplicate_name"
    ADDRESS_TAKEN = "address_taken"
    UNKNOWN_CLUSTER = "unknown_cluster"
    UNKNOWN_ROLE = "unknown_role"
    UNKNOWN_POOL = "unknown_pool"
    OTHER_MODEL = "other_model"
    OTHER_LAYOUT = "other_layout"
    TOO_MANY = "too_many"
    NO_IDENTITY = "no_identity"
    """Prompts and cache salts would go to whoever answers at its address."""
    INVALID = "invalid"
    """Its entry cannot be read."""


@dataclass(frozen=True, slots=True)
class Member:
    """One part of a site. Two that differ in anything are different members."""

    name: str
    """Unique among all parts; its identity."""
    kind: MemberKind
    cluster: str
    address: str
    """URL of an engine, HOST:PORT of others."""
    pool: str = ""
    """Pool node on the host of an engine; "" for others."""
    role: str = ""
    """Of an engine: "both", "prefill" or "decode"; "" for others."""
    model: str = ""
    """Served model; "" if its source does not name it."""
    settings: tuple[tuple[str, str], ...] = ()
    """Further settings, by name, sorted."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A member in the list of a source."""

    member: Member
    is_ready: bool = True
    """False if the source knows that it is not to get work."""
    is_ending: bool = False
    """True if it is about to leave."""


@dataclass(frozen=True, slots=True)
class RefusedEntry:
    """A refused entry."""

    name: str
    reason: RefusalCause
    words: str
    """What is wrong, with the value and the next step."""


@dataclass(frozen=True, slots=True)
class Site:
    """Facts of a site with which its members have to agree."""

    clusters: Mapping[str, Sequence[str]]
    """Roles that engines may have, by cluster."""
    model: str
    limits: Mapping[MemberKind, int] = field(
        default_factory=lambda: {
            MemberKind.POOL: 512,
            MemberKind.ENGINE: 4096,
            MemberKind.GATEWAY: 64,
        }
    )
    """Largest number of members, by kind."""
    identified: Set[str] = frozenset()
    """Sources whose engines need an identity, unless they are on this machine."""


_KINDS = {kind: number for number, kind in enumerate(MemberKind)}


def accepted(
    listed: Iterable[Listed], incumbents: Mapping[str, Member], site: Site
) -> tuple[dict[str, Listed], list[RefusedEntry]]:
    """Divide the entries of all sources into members and refusals; returns accepted entries by
    name, pool nodes first, and the refusals.

    An incumbent keeps its name and address against newcomers, so that a wrong entry harms nobody.

    Args:
        listed: Entries of all sources.
        incumbents: Members that have joined, by name.
        site: What they have to agree with.
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


LinkEnds = tuple[str, str]
"""Source and destination pool of a link."""


class PoolLinks:
    """Links from each PrfaaS pool to each PD pool, and between the pools of a cluster.

    A pool without engines has no links. An event costs work for its own pool only.

    Args:
        engines: Name, pool and cluster of each engine.
        local: Names of the PD clusters.
    """

    def __init__(self, engines: Iterable[tuple[str, str, str]], local: Collection[str]) -> None:
        self._local_names = local
        self._engines: dict[str, dict[str, None]] = {}
        self._cluster: dict[str, str] = {}
        """Cluster of each pool with engines."""
        self._pools: dict[str, dict[str, None]] = {}
        """Pools of each cluster; none is empty."""
        for name, pool, cluster in engines:
            self.add(name, pool, cluster)

    def add(self, name: str, pool: str, cluster: str) -> list[LinkEnds]:
        """An engine joins; return the links that this makes."""
        is_new = pool not in self._engines
        self._engines.setdefault(pool, {})[name] = None
        if not is_new:
            return []
        self._cluster[pool] = cluster
        self._pools.setdefault(cluster, {})[pool] = None
        return self.of(pool)

    def remove(self, name: str, pool: str) -> None:
        """An engine has left."""
        del self._engines[pool][name]
        if self._engines[pool]:
            return
        del self._engines[pool]
        cluster = self._cluster.pop(pool)
        del self._pools[cluster][pool]
        if not self._pools[cluster]:
            del self._pools[cluster]

    def engines_of(self, pool: str) -> Collection[str]:
        """Engines of a pool."""
        return self._engines.get(pool, ())

    def cluster_of(self, pool: str) -> str:
        """Cluster of a pool with engines."""
        return self._cluster[pool]

    def all(self) -> list[LinkEnds]:
        """All links; as many as pools squared."""
        within = [ends for pools in self._pools.values() for ends in permutations(pools, 2)]
        return [*product(self._side(local=False), self._side(local=True)), *within]

    def of(self, pool: str) -> list[LinkEnds]:
        """Links of a pool."""
        if (cluster := self._cluster.get(pool)) is None:
            return []
        is_local = cluster in self._local_names
        across = self._side(local=not is_local)
        hosts = [other for other in self._pools[cluster] if other != pool]
        return [
            *((other, pool) if is_local else (pool, other) for other in across),
            *((pool, other) for other in hosts),
            *((other, pool) for other in hosts),
        ]

    def _side(self, *, local: bool) -> list[str]:
        """Pools of the PD clusters, or of the PrfaaS clusters."""
        found = self._pools.items()
        return [pool for name, its in found if (name in self._local_names) is local for pool in its]
