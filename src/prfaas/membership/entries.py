"""Members of a deployment file, and the tables of members that join later."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from pydantic import ValidationError

from prfaas.config.addresses import join_address
from prfaas.config.clusters import ClusterRole, EngineTable, PoolTable
from prfaas.config.deployment import Deployment
from prfaas.core.membership.members import Listed, Member, MemberKind, Site


def site_of(deployment: Deployment) -> Site:
    """The facts with which members of a deployment have to agree."""
    local = ("prefill", "decode") if deployment.has_roles else ("both",)
    return Site(
        {
            name: local if table.role is ClusterRole.PD else ("both",)
            for name, table in deployment.clusters.items()
        },
        deployment.model.name,
        identified=deployment.membership.identity.sources,
    )


def entries_of(
    deployment: Deployment, engines: Mapping[str, str], pools: Mapping[str, tuple[str, int]]
) -> list[Listed]:
    """Members of a deployment file; ValueError if the address of a part is unknown.

    Args:
        engines: URL of engines that have none in the file.
        pools: Address of pool nodes that have none in the file.
    """
    found = []
    for cluster, table in deployment.clusters.items():
        for name, pool in table.pools.items():
            address = join_address(pools[name]) if name in pools else pool.address
            if address is None:
                raise ValueError(f"clusters.{cluster}.pools.{name} has no `address`; give one")
            found.append(Listed(Member(name, MemberKind.POOL, cluster, address)))
        for name, engine in table.engines.items():
            url = engines.get(name, engine.url)
            if url is None:
                raise ValueError(f"clusters.{cluster}.engines.{name} has no `url`; give one")
            found.append(Listed(engine_member(name, cluster, url, engine)))
    return found


def link_settings(budget: int | None, connections: int | None) -> tuple[tuple[str, str], ...]:
    """Settings of a pool node's member: those of links to it."""
    settings = {"budget": budget, "connections": connections}
    return tuple((key, str(value)) for key, value in settings.items() if value)


def engine_member(name: str, cluster: str, url: str, table: EngineTable) -> Member:
    """The member of an engine's table."""
    settings = {
        "kv_events": table.kv_events,
        "kv_events_replay": table.kv_events_replay,
        "sequences_max": str(table.num_slots),
        "rank": None if table.rank is None else str(table.rank),
    }
    return Member(
        name,
        MemberKind.ENGINE,
        cluster,
        url.rstrip("/"),
        table.pool,
        table.role.value,
        settings=tuple((key, value) for key, value in settings.items() if value is not None),
    )


def engine_table(member: Member) -> EngineTable:
    """The table of an engine that joins."""
    settings: dict[str, object] = dict(member.settings)
    for key in ("sequences_max", "rank"):
        if key in settings:
            settings[key] = int(str(settings[key]))
    return EngineTable.model_validate(
        {"pool": member.pool, "role": member.role, "url": member.address, **settings}
    )


@lru_cache(maxsize=8192)
def fault_of(member: Member) -> str:
    """Reason for which a member cannot be connected to; "" if it can."""
    try:
        if member.kind is MemberKind.ENGINE:
            engine_table(member)
        elif member.kind is MemberKind.POOL:
            pool_table(member)
        else:
            return f"members of kind {member.kind.value} do not join while a gateway runs"
    except ValidationError as error:
        return "; ".join(f"{each['loc']}: {each['msg']}" for each in error.errors())
    return ""


def pool_table(member: Member) -> PoolTable:
    """The table of a pool node that joins."""
    return PoolTable.model_validate({"address": member.address})
