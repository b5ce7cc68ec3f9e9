"""Members as sources list them, and the reasons for which a site refuses one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum


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
    """One part of a site. Two that differ in anything are different members.

    Attributes:
        name: Unique among all parts; its identity.
        address: URL of an engine, HOST:PORT of others.
        pool: Pool node on the host of an engine; "" for others.
        role: Of an engine: "both", "prefill" or "decode"; "" for others.
        model: Served model; "" if its source does not name it.
        settings: Further settings, by name, sorted.
    """

    name: str
    kind: MemberKind
    cluster: str
    address: str
    pool: str = ""
    role: str = ""
    model: str = ""
    settings: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Listed:
    """A member in the list of a source.

    Attributes:
        is_ready: False if the source knows that it is not to get work.
        is_ending: True if it is about to leave.
    """

    member: Member
    is_ready: bool = True
    is_ending: bool = False


@dataclass(frozen=True, slots=True)
class RefusedEntry:
    """A refused entry.

    Attributes:
        words: What is wrong, with the value and the next step.
    """

    name: str
    reason: RefusalCause
    words: str


@dataclass(frozen=True, slots=True)
class Site:
    """Facts of a site with which its members have to agree.

    Attributes:
        clusters: Roles that engines may have, by cluster.
        limits: Largest number of members, by kind.
        identified: Sources whose engines need an identity, unless they are on this machine.
    """

    clusters: Mapping[str, Sequence[str]]
    model: str
    limits: Mapping[MemberKind, int] = field(
        default_factory=lambda: {
            MemberKind.POOL: 512,
            MemberKind.ENGINE: 4096,
            MemberKind.GATEWAY: 64,
        }
    )
    identified: Set[str] = frozenset()
