"""`[tenants.TENANT]`: access to a deployment, and limits."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints, field_validator

from prfaas.config.addresses import split_address
from prfaas.config.quantities import DurationNs, RateBitsPerS, Table, age_long_enough
from prfaas.core.cache.tenant_shares import RESERVES_MAX
from prfaas.core.codec.codecs import Quality
from prfaas.core.transfer.residency import REGION, REGIONS_MAX
from prfaas.units import NS_PER_S

KEY_HASH = r"^sha256:[0-9a-f]{64}$"
KEYS_MAX = 16
"""Keys of one tenant: two while they are changed, a few for its services."""
UNNAMED_OPERATOR = "operator"
"""Name of the operators whose keys are in `gateway.operator_keys`."""
TENANTS_MAX = 1000
"""Bounds the labels of metrics."""

KeyHash = Annotated[str, StringConstraints(pattern=KEY_HASH)]
KeyHashes = Annotated[list[KeyHash], Field(max_length=KEYS_MAX)]
FieldName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")]
RequestFields = Annotated[list[FieldName], Field(max_length=64)]
RegionNames = Annotated[
    list[Annotated[str, StringConstraints(pattern=REGION)]], Field(max_length=REGIONS_MAX)
]
PositiveCount = Annotated[int, Field(ge=1, le=10**15)]


class TenantTable(Table):
    """`[tenants.TENANT]`: a tenant with its keys and limits."""

    keys: Annotated[KeyHashes, Field(min_length=1)]
    """Hashes of its API keys: "sha256:" and 64 hex digits, as printed by `prfaas tenant key`."""
    weight: float = Field(default=1.0, gt=0, le=1000)
    """Share under overload, relative to other tenants."""
    requests_per_minute: PositiveCount | None = None
    """Limit of requests; more are refused with 429."""
    tokens_per_minute: PositiveCount | None = None
    """Limit of prompt and output tokens together; above it, requests are refused with 429."""
    requests_in_flight: PositiveCount | None = None
    """Limit of concurrent requests, counted by their prompts times `n`; more are refused with 429.
    """
    request_fields: RequestFields = Field(default=[])
    """Fields that its requests may set in addition to `gateway.request_fields`."""
    link_rate: Annotated[RateBitsPerS, Field(ge=8)] | None = None
    """Limit of its KV traffic on all links together, such as "1Gbps", for hand-offs and pulls;
    above it, prompts are prefilled locally without pulls. Copies of hot prefixes have a separate
    rate, `routing.replication`."""
    regions: RegionNames | None = None
    """Regions that its prompts and blocks may be in, such as ["eu"]; all if absent. They have to
    include all regions of the PD clusters. PrfaaS clusters outside are not used for it."""
    cache_reserve: float = Field(default=0.0, ge=0, le=RESERVES_MAX)
    """Share of the memory and of the disk of each pool node whose blocks no other tenant evicts.
    All reserves together are at most 0.75."""
    cache_max: float = Field(default=1.0, gt=0, le=1)
    """Largest share of the memory and of the disk of each pool node."""
    cache_max_age: DurationNs | None = None
    """Largest age of its blocks, such as "24h", counted from their computation: older ones are
    neither served nor kept in pools. `gateway.cache_max_age` if absent."""
    isolate_users: bool = False
    """Give each end user, as named by a request's `safety_identifier` or `user`, KV blocks of their
    own; requests without these fields share the tenant's."""
    service_tier: str | None = None
    """Class of service of its requests, a name of `[classes]`; none if absent."""
    service_tiers: Annotated[list[str], Field(max_length=32)] = Field(default=[])
    """Other classes that its requests may name in `service_tier`."""
    quality: Annotated[Quality, Field(strict=False)] = Quality.LOSSLESS
    """Quality class of its KV blocks: "lossless", "fp8", "kivi4", either of these with
    "+bf16-state", or "bf16-state". Blocks of the others are rounded on links."""

    _age = field_validator("cache_max_age")(age_long_enough)

    @property
    def has_share(self) -> bool:
        """Return True if it has a reserve or a limit in pools."""
        return self.cache_reserve > 0 or self.cache_max < 1


class OperatorRank(StrEnum):
    """Rank of an operator; each may do what those before it may."""

    METRICS = "metrics"
    VIEW = "view"
    CHANGE = "change"


class OperatorTable(Table):
    """`[operators.OPERATOR]`: an operator with keys of their own."""

    keys: Annotated[KeyHashes, Field(min_length=1)]
    """Hashes of keys for `/metrics`, `/control` and `/kv`, as printed by `prfaas tenant key`. The
    audit log names the operator of each change."""
    rank: Annotated[OperatorRank, Field(strict=False)] = OperatorRank.CHANGE
    """Rights of the keys: `"metrics"` (`/metrics` alone), `"view"` (all that changes nothing) or
    `"change"` (everything, purges included)."""


def check_keys(
    tenants: Mapping[str, TenantTable],
    operators: Mapping[str, OperatorTable],
    operator_keys: list[str],
) -> None:
    """A key belongs to one tenant, or to one operator; ValueError if one hash is given twice, or
    two operators have one name."""
    if operator_keys and UNNAMED_OPERATOR in operators:
        raise ValueError(
            f"operators.{UNNAMED_OPERATOR}: the keys of gateway.operator_keys have this name; "
            "choose another one"
        )
    owners = [("gateway.operator_keys", key) for key in operator_keys]
    owners += [(f"operators.{name}", key) for name, t in operators.items() for key in t.keys]
    owners += [(f"tenants.{name}", key) for name, table in tenants.items() for key in table.keys]
    counts = Counter(key for _, key in owners)
    for place, key in owners:
        if counts[key] > 1:
            raise ValueError(f"{place}: {key[:15]}... is given twice; a key has one owner")


def check_shares(tenants: Mapping[str, TenantTable]) -> None:
    """Shares of pools do not contradict each other.

    Raises:
        ValueError: A reserve is above the limit of its tenant, or all together are too large.
    """
    for name, table in tenants.items():
        if table.cache_reserve > table.cache_max:
            raise ValueError(
                f"tenants.{name}.cache_reserve is {table.cache_reserve:g}, more than its cache_max "
                f"of {table.cache_max:g}; raise cache_max, or lower cache_reserve"
            )
    total = sum(table.cache_reserve for table in tenants.values())
    if total > RESERVES_MAX + 1e-9:
        raise ValueError(
            f"cache_reserve of all tenants together is {total:g}, the limit is {RESERVES_MAX}: the "
            "rest is what blocks are received into; lower some"
        )


def max_ages(
    tenants: Mapping[str, TenantTable], tags: Mapping[str, str], default_ns: int | None
) -> dict[str, int]:
    """Return the largest age of blocks by the tags of tenants, seconds.

    Args:
        tenants: Those with settings, by name.
        tags: Tags of all tenants, by name.
        default_ns: Of the other tenants, and under the empty tag of all other blocks.
    """
    limits = dict.fromkeys(("", *tags.values()), default_ns)
    limits |= {tags[name]: t.cache_max_age for name, t in tenants.items() if t.cache_max_age}
    return {tag: limit // NS_PER_S for tag, limit in limits.items() if limit}


def open_doors(listen: str, *, tenants: bool, operator_keys: bool, tls: bool) -> Iterator[str]:
    """Yield warnings about access to a gateway and about unencrypted connections.

    Args:
        listen: Address of the gateway.
        tenants: True if there are any.
        operator_keys: True if there are any.
        tls: True if clients speak HTTPS.
    """
    if is_loopback(listen):
        return
    if not tenants:
        yield (
            f"gateway.listen {listen} is no loopback address and there are no tenants: whoever "
            "reaches it may use it without a key; add [tenants.NAME], see docs/tenants.md"
        )
    elif not operator_keys:
        yield (
            f"gateway.operator_keys is empty: /metrics and /control are closed on {listen}; "
            "create a key with `prfaas tenant key`"
        )
    if not tls:
        yield (
            f"keys, prompts and answers cross the network to {listen} in clear; set [gateway.tls], "
            "or listen on loopback behind a proxy (docs/proxies.md)"
        )


def is_loopback(listen: str) -> bool:
    """Return True if an address HOST:PORT is reached from its own machine only."""
    host, _ = split_address(listen)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
