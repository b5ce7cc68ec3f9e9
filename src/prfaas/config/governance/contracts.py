"""The contracts file of a PrfaaS site: who shares its cluster, and how much each may use."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from prfaas.config.addresses import split_address
from prfaas.config.names import PATTERNS, FilePathText, HostPort, PartName, Url
from prfaas.config.quantities import RateBitsPerS, Table
from prfaas.core.admission.contracts import SITES_MAX, Contract
from prfaas.core.cache.tenant_shares import RESERVES_MAX, Share
from prfaas.toml_tables import read_toml, validated

PARTS_MAX = 256
"""Gateways, and pool nodes, of one site."""


class SharedEngineTable(Table):
    """`[engines.ENGINE]`: an engine behind the proxy."""

    listen: HostPort
    """Address of the proxy for this engine, which gateways have as its `url`."""
    url: Url
    """URL of the engine itself: plain HTTP on this machine, where only the proxy reaches it."""
    slots: int = Field(default=2, ge=1, le=4096)
    """Requests that it gets at a time; all others wait in the proxy. Two keep it busy while it
    prefills long prompts one after the other; more for short prompts."""


class ContractTable(Table):
    """`[contracts.SITE]`: a PD site that uses this cluster."""

    authority: FilePathText
    """PEM file with the certificate of the site's authority. Only it can prove the site's names."""
    gateways: Annotated[list[PartName], Field(min_length=1, max_length=PARTS_MAX)]
    """Names of its gateways; no other site has one of these names."""
    pools: Annotated[dict[PartName, HostPort], Field(min_length=1, max_length=PARTS_MAX)]
    """Its pool nodes: name and address. No other site has one of these names."""
    share: float = Field(gt=0, le=1000)
    """Its part of the engines under overload, relative to the shares of the other sites."""
    tokens_per_s: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """Limit of the prompt tokens that are computed for it a second, also on idle engines; none if
    absent."""
    queued_max: int = Field(default=256, ge=1, le=100_000)
    """Requests that may wait for engines; more are refused with 429, and the site prefills them
    itself."""
    connections_max: int | None = Field(default=None, ge=1, le=1_000_000)
    """Connections of its gateways to the proxy, for all engines; more are refused with 429, or
    closed. Four times `queued_max` if absent, and at least 64."""
    link_rate: Annotated[RateBitsPerS, Field(ge=1_000_000)] | None = None
    """Limit of the KV traffic of each pool node of this cluster to all of its pool nodes together,
    such as "4Gbps"; each of them gets an equal part."""
    cache_reserve: float = Field(default=0.0, ge=0, le=RESERVES_MAX)
    """Share of the memory of each pool node of this cluster whose blocks no other site evicts. All
    reserves together are at most 0.75."""
    cache_max: float = Field(default=1.0, gt=0, le=1)
    """Largest share of the memory of each pool node of this cluster."""


class ContractsFile(Table):
    """A contracts file. It is followed: a removed table ends the site's use within seconds."""

    engines: Annotated[dict[PartName, SharedEngineTable], Field(max_length=1000)] = Field(
        default={}
    )
    contracts: Annotated[dict[PartName, ContractTable], Field(max_length=SITES_MAX)] = Field(
        default={}
    )

    @model_validator(mode="after")
    def _names_are_unique(self) -> ContractsFile:
        _unique("gateway", ((n, s) for s, each in self.contracts.items() for n in each.gateways))
        _unique("pool node", ((n, s) for s, each in self.contracts.items() for n in each.pools))
        for site, each in self.contracts.items():
            if both := sorted(
                set(each.gateways) & {n for c in self.contracts.values() for n in c.pools}
            ):
                raise ValueError(
                    f"contracts.{site}: {', '.join(both)} cannot be a gateway and a pool node"
                )
            if each.cache_reserve > each.cache_max:
                raise ValueError(
                    f"contracts.{site}: cache_reserve {each.cache_reserve:g} is above cache_max "
                    f"{each.cache_max:g}"
                )
        if (total := sum(each.cache_reserve for each in self.contracts.values())) > RESERVES_MAX:
            raise ValueError(
                f"cache_reserve of all contracts is {total:g} together; the limit is {RESERVES_MAX}"
            )
        return self

    def agreed(self) -> list[Contract]:
        """The contracts as the parts of the site use them."""
        return [_contract(site, table) for site, table in self.contracts.items()]

    def authorities(self) -> dict[str, Path]:
        """The file of each site's authority."""
        return {site: table.authority for site, table in self.contracts.items()}


def load_contracts(path: Path) -> ContractsFile:
    """Read a contracts file; ConfigError if it cannot be read, or breaks a rule."""
    return validated(ContractsFile, read_toml(path), path, words=PATTERNS)


def _contract(site: str, table: ContractTable) -> Contract:
    return Contract(
        site=site,
        share=table.share,
        gateways=frozenset(table.gateways),
        pools={name: split_address(address) for name, address in table.pools.items()},
        tokens_per_s=table.tokens_per_s,
        queued_max=table.queued_max,
        connections_max=table.connections_max or max(64, 4 * table.queued_max),
        memory=Share(table.cache_reserve, table.cache_max),
        link_bits_per_s=table.link_rate or 0,
    )


def _unique(kind: str, names: Iterable[tuple[str, str]]) -> None:
    owners: dict[str, str] = {}
    for name, site in names:
        if (other := owners.setdefault(name, site)) != site:
            raise ValueError(f"{kind} {name} is in contracts.{other} and contracts.{site}")
