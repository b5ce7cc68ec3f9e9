"""The tables of clusters, pools and engines of a deployment file."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints, field_validator, model_validator

from prfaas.config.engine_args import SEQUENCES, check_parallelism, size_of
from prfaas.config.engines.ranks import RANKS_MAX, with_ranks
from prfaas.config.names import (
    BUCKET,
    PREFIX,
    REGION,
    ZMQ,
    FilePathText,
    HostPort,
    PartName,
    RegionName,
    Url,
)
from prfaas.config.quantities import (
    DurationNs,
    RateBitsPerS,
    SizeBytes,
    Table,
    holds_a_block,
    long_enough,
)
from prfaas.config.tenants import is_loopback
from prfaas.config.tiers.mooncake import MooncakeTable
from prfaas.core.codec.codecs import LinkCodec
from prfaas.core.kv.blocks import HashScheme
from prfaas.core.transfer.link_encryption import LinkEncryption


class LinkTable(Table):
    """`[clusters.CLUSTER.pools.POOL.links.PEER]`: the link over which a pool pushes to PEER."""

    budget: Annotated[RateBitsPerS, Field(ge=1_000_000)] | None = None
    """Limit of its rate, such as "1Gbps": at most 93 % of the capacity of the path keeps queues
    empty."""
    connections: int | None = Field(default=None, ge=1, le=16)
    """Data connections; if absent, computed from rate and round trip."""


class PoolTable(Table):
    """`[clusters.CLUSTER.pools.POOL]`: a pool node."""

    memory: SizeBytes = 2**30
    """Bytes of KV blocks held in host memory."""
    disk: FilePathText | None = None
    """Folder for blocks evicted from memory, on a disk of the host; none if absent."""
    disk_limit: SizeBytes | None = None
    """Limit of the files in that folder; required with `disk`."""
    disk_sealed: bool = True
    """Seal the blocks on disk with a key for each tenant."""
    disk_keys: FilePathText | None = None
    """File of the site's keys, which wrap the keys of tenants; if absent, NAME.disk-key in `state`,
    which the pool node makes at its first start."""
    region: RegionName | None = None
    """Region of its host, if it is not that of its cluster."""
    disk_region: RegionName | None = None
    """Region of the disk, if it is not that of the host."""
    listen: HostPort | None = None
    """Address for links. If absent, a free local port under `prfaas up`, and the port of `address`
    on every interface under `prfaas pool`."""
    admin: HostPort | None = None
    """Address of `/health` and `/metrics`: plain HTTP, only for this host. If absent,
    127.0.0.1:7180 under `prfaas pool`, and under `prfaas up` a port of 127.0.0.1 from 20000 to
    29999 derived from `state` and the name: the same at every start if it is free."""
    address: HostPort | None = None
    """Address for other hosts, if `prfaas pool` starts it on its own host; `prfaas up` then does
    not start it."""
    socket: FilePathText | None = None
    """Unix socket for the engines of its host; NAME.sock in `state` if absent."""
    drain_timeout: DurationNs = 10 * 10**9
    """Time limit for open transfers when the pool node stops."""
    transfers_max: int = Field(default=10_000, ge=1, le=1_000_000)
    """Open transfers to it; more are refused."""
    link_codec: Annotated[LinkCodec, Field(strict=False)] = LinkCodec.AUTO
    """Lossless coding of blocks on its links: "auto" codes where that raises the rate of a link,
    "always" codes all that shrinks, "raw" neither codes nor accepts coded blocks. Both ends of a
    link have to allow it."""
    link_encryption: Annotated[LinkEncryption, Field(strict=False)] = LinkEncryption.SEALED
    """Protection of blocks on its links: "sealed" is AES-256-GCM with keys from the TLS connection
    for messages, "tls" is TLS 1.3, which takes half as much CPU again. "network" authenticates
    blocks but does **not encrypt** them: only where the network between the sites does. A link uses
    "network" if both ends have it, "tls" if one end has it or the path asks for it, else
    "sealed"."""
    link_lanes: int = Field(default=1, ge=1, le=16)
    """Threads that move the bytes of sealed data connections. One carries several Gbit/s; more need
    a core each, at both ends."""
    links: dict[PartName, LinkTable] = Field(default={})
    """Settings of links to its destination pool nodes: the other hosts of its cluster, and, in a
    PrfaaS cluster, those of PD clusters."""

    _sizes = field_validator("memory", "disk_limit")(holds_a_block)

    @field_validator("disk", mode="before")
    @classmethod
    def _disk_is_named(cls, value: object) -> object:
        if value == "":
            raise ValueError("it is empty; name a folder, or leave `disk` and `disk_limit` out")
        return value

    @model_validator(mode="after")
    def _lanes_are_of_use(self) -> PoolTable:
        if self.link_lanes > 1 and self.link_encryption is not LinkEncryption.SEALED:
            raise ValueError(
                f'link_lanes is {self.link_lanes}, and link_encryption "{self.link_encryption}" '
                "uses one; set "
                'link_encryption = "sealed", or leave `link_lanes` out'
            )
        return self

    @model_validator(mode="after")
    def _disk_has_a_limit(self) -> PoolTable:
        if (self.disk is None) != (self.disk_limit is None):
            raise ValueError("give `disk` and `disk_limit` together, or neither")
        if self.disk is None and self.disk_region is not None:
            raise ValueError("disk_region is given without `disk`")
        if self.disk_keys is not None and (self.disk is None or not self.disk_sealed):
            raise ValueError("disk_keys is given without `disk`, or with disk_sealed = false")
        return self


SEQUENCES_MAX = 256
"""vLLM's own `--max-num-seqs` on most machines."""


class EngineRole(StrEnum):
    """Role of an engine of a PD cluster; every engine can do both."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class EngineTable(Table):
    """`[clusters.CLUSTER.engines.ENGINE]`: a vLLM instance."""

    pool: PartName
    """The pool node on its host."""
    role: Annotated[EngineRole, Field(strict=False)] = EngineRole.BOTH
    """In a PD cluster: "prefill" computes local prompts, "decode" decodes, "both" does both for the
    same request. Either all PD engines are "both", or none is; then they are of one cluster, on any
    of its hosts. With `routing.reroling` it is the initial role."""
    listen: HostPort | None = None
    """Address, if `prfaas up` starts it."""
    url: Url | None = None
    """URL, if it is started elsewhere; https for another site."""
    ranks: int = Field(default=1, ge=1, le=RANKS_MAX)
    """Data-parallel ranks behind `url` (`--data-parallel-size`). Each is an engine of its own to
    the gateway: ENGINE-0, ENGINE-1 and so on, with the rank added to the ports of its KV events."""
    rank: int | None = Field(default=None, ge=0, lt=RANKS_MAX)
    """Data-parallel rank that this engine is of all those behind `url`; needs no `ranks`."""
    host_memory: SizeBytes = 2**30
    """Memory shared between the engine and its pool node."""
    cpus: str = ""
    """Cores of the engine, on machines without a GPU: "0" or "0-3". Engines of one machine may
    share cores; the policy `observed` offloads nothing to a PrfaaS engine that has no other cores
    than the PD engine."""
    kv_cache_memory: SizeBytes = 2**30
    """Memory for the KV cache, on machines without a GPU."""
    kv_events: Annotated[str, StringConstraints(pattern=ZMQ)] | None = None
    """Address of the KV events of its device memory: "ipc://PATH" on this machine, set up by
    `prfaas up`, or "tcp://HOST:PORT" of an engine started elsewhere. The events carry unencrypted
    prompts: keep them inside the cluster."""
    kv_events_replay: Annotated[str, StringConstraints(pattern=ZMQ)] | None = None
    """Address of the replay of missed events; needs `kv_events`."""
    sequences_max: int | None = Field(default=None, ge=1, le=1_000_000)
    """Limit of concurrent sequences; with several tenants further requests wait in the gateway.

    If absent, `--max-num-seqs` of its `args`, or 256.
    """
    args: list[str] = Field(default=[])
    """Further arguments for the engine."""
    env: dict[str, str] = Field(default={})
    """Further environment variables for the engine."""

    _sizes = field_validator("host_memory")(holds_a_block)

    @property
    def num_slots(self) -> int:
        """Limit of concurrent sequences, if the file has it."""
        if self.sequences_max is not None:
            return self.sequences_max
        return size_of(self.args, SEQUENCES, SEQUENCES_MAX) or SEQUENCES_MAX

    @field_validator("env")
    @classmethod
    def _has_names(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not name or "=" in name:
                raise ValueError(f"{name!r} is no name of a variable: it is empty or has a '='")
        return value

    @model_validator(mode="after")
    def _one_place(self) -> EngineTable:
        if self.listen and self.url:
            raise ValueError("give `listen` (started here) or `url` (started elsewhere)")
        return self

    @model_validator(mode="after")
    def _ranks_are_served(self) -> EngineTable:
        events = self.kv_events is not None and self.rank is None
        check_parallelism(self.args, kv_events=events)
        if self.ranks > 1:
            raise ValueError("`ranks` is for a table of `[clusters.CLUSTER.engines]`; give `rank`")
        if self.rank is not None and self.url is None:
            raise ValueError(
                "data-parallel ranks need the `url` that they share: prfaas starts no engine with "
                "ranks that it routes to; start it elsewhere, or without `ranks` and `rank`"
            )
        return self

    @model_validator(mode="after")
    def _publishes_here(self) -> EngineTable:
        if self.kv_events_replay and not self.kv_events:
            raise ValueError("kv_events_replay needs kv_events")
        for where in (self.kv_events, self.kv_events_replay):
            if where and not self.url and not where.startswith("ipc://"):
                raise ValueError(
                    f"{where!r} would be open to the network, and KV events carry prompts in the "
                    'clear; an engine that is started here publishes at "ipc://PATH"'
                )
        return self


class TimingTable(Table):
    """`[clusters.CLUSTER.timing]`: its engines compute nothing, but take their time."""

    plan: FilePathText
    """Plan file of `prfaas plan` with the times of an instance of the cluster."""
    time_scale: float = Field(default=1.0, gt=0, le=1e6)
    """Seconds of wall clock per second of the plan: 0.1 is ten times as fast."""
    bytes_scale: float = Field(default=1.0, gt=0, le=1e6)
    """Size of KV blocks, as a share of the model's: 0.01 is a hundredth."""
    block_tokens: int = Field(default=512, ge=16)
    """Tokens of a block."""
    cache_tokens: int = Field(default=1_000_000, ge=1)
    """Size of each engine's prefix cache, tokens."""
    max_model_len: int = Field(default=131_072 + 8_192, ge=1)
    """Longest sequence, tokens."""
    stream_interval: int = Field(default=1, ge=1)
    """Tokens per chunk of a stream, after the first."""
    one_process: bool = False
    """Run all engines of a pool in one process."""
    hash_scheme: Annotated[HashScheme, Field(strict=False)] = HashScheme.SHA256_CBOR
    """Names of blocks, and with it the kind of engine: "sha256_cbor" is vLLM's. With
    "sglang_pages" the engines behave as SGLang's: they take no orders of the gateway, store pages
    behind their prefill, and need a model with full attention only."""


OBJECT_BYTES_MIN, OBJECT_BYTES_MAX = 4 << 20, 64 << 20
DEADLINE_NS_MAX = 60 * 10**9


class S3Table(Table):
    """`[clusters.CLUSTER.s3]`: a bucket that the pool nodes of the cluster share."""

    bucket: Annotated[str, StringConstraints(pattern=BUCKET)]
    """Bucket of an S3 server. Credentials come from the environment of the pool nodes:
    `AWS_ACCESS_KEY_ID` and the other variables of the AWS tools, or the role of the machine."""
    keys: FilePathText
    """File with the keys that blocks are encrypted with: base64 of 32 random bytes a line, the one
    for new blocks first. The same on all hosts of the cluster."""
    limit: SizeBytes
    """Limit of the bytes that each pool node keeps in the bucket. It deletes its own oldest objects
    beyond it."""
    prefix: Annotated[str, StringConstraints(pattern=PREFIX)] | None = None
    """Start of the names of all objects; the name of the cluster if absent."""
    endpoint: Url | None = None
    """Address of the server, if it is not AWS; https unless it is on this machine."""
    region: Annotated[str, StringConstraints(pattern=REGION)] | None = None
    """Region of the bucket for the S3 server; that of the environment if absent."""
    data_region: RegionName | None = None
    """Region of its data in the words of `clusters.CLUSTER.region`; required where clusters have
    regions."""
    deadline: DurationNs = 10**9
    """Longest time that the reads of one request may take together; then it continues without these
    blocks."""
    object_size: SizeBytes = 16 << 20
    """Size of an object, 4 to 64 MiB. A pool node holds up to four in memory while it writes."""

    _sizes = field_validator("limit")(holds_a_block)
    _times = field_validator("deadline")(long_enough)

    @field_validator("deadline")
    @classmethod
    def _is_short(cls, value: int) -> int:
        if value > DEADLINE_NS_MAX:
            raise ValueError(f"{value / 10**9:g} s are longer than any prefill; the most is 60 s")
        return value

    @field_validator("object_size")
    @classmethod
    def _is_an_object(cls, value: int) -> int:
        if not OBJECT_BYTES_MIN <= value <= OBJECT_BYTES_MAX:
            raise ValueError(f"{value} bytes; the limits are 4MiB and 64MiB")
        return value

    @field_validator("endpoint")
    @classmethod
    def _is_private(cls, value: str | None) -> str | None:
        if value and value.startswith("http://"):
            host = value.removeprefix("http://")
            if not is_loopback(host if host.rpartition("]")[2].count(":") else f"{host}:80"):
                raise ValueError(
                    f"{value} is plain HTTP to another machine, where everybody on the path can "
                    "read requests and change answers; use https://"
                )
        return value

    @model_validator(mode="after")
    def _holds_objects(self) -> S3Table:
        if self.limit < 2 * self.object_size:
            raise ValueError(
                f"limit: {self.limit} bytes hold fewer than two objects of {self.object_size} "
                "(object_size)"
            )
        return self


class ClusterRole(StrEnum):
    """Role of a cluster."""

    PRFAAS = "prfaas"
    """Remote, prefill only."""
    PD = "pd"
    """Local: prefill and decode."""


class ClusterTable(Table):
    """`[clusters.CLUSTER]`: a site."""

    role: Annotated[ClusterRole, Field(strict=False)]
    """"prfaas": remote, prefill only; "pd": local, prefill and decode."""
    region: RegionName | None = None
    """Region of its hosts, in your own words, such as "eu". If one cluster has a region, all need
    one; then tickets and certificates have to allow the region of a transfer."""
    pools: dict[PartName, PoolTable] = Field(default={})
    engines: dict[PartName, EngineTable] = Field(default={})
    link_budget: Annotated[RateBitsPerS, Field(ge=1_000_000)] | None = None
    """Limit of the rate of all links of its pool nodes to other clusters together, as in "10Gbps".
    Gateways give it out as leases, by what waits at each pool node; without a gateway each has an
    equal share. `budget` of a link stays the limit of that link. Not with `[membership]`: its pool
    nodes are in no file."""
    s3: S3Table | None = None
    """A tier below the memory and disks of its pool nodes, for blocks that they share. Needs the
    package: `pip install 'prfaas[s3]'`."""
    mooncake: MooncakeTable | None = None
    """Mooncake Store that the pool nodes share, in place of a bucket. Needs a package:
    `pip install 'prfaas[mooncake]'`."""
    timing: TimingTable | None = None
    """Makes the engines that are started here timing engines, which compute nothing."""
    has_roles: bool = False
    """Engines of this PD cluster that join by `[membership]` have the roles "prefill" and "decode";
    true if engines in the file have them."""

    @field_validator("engines", mode="before")
    @classmethod
    def _each_rank_is_an_engine(cls, value: object) -> object:
        return with_ranks(value)

    @model_validator(mode="after")
    def _has_one_shared_tier(self) -> ClusterTable:
        if self.s3 is not None and self.mooncake is not None:
            raise ValueError("it has both `s3` and `mooncake`; a cluster has one shared tier")
        return self

    @model_validator(mode="after")
    def _pools_exist(self) -> ClusterTable:
        for name, engine in self.engines.items():
            if engine.pool not in self.pools:
                known = ", ".join(self.pools)
                raise ValueError(f"engine {name}: pool {engine.pool!r} is not one of {known}")
        return self


def check_roles(clusters: Collection[tuple[str, ClusterTable]], *, reroling: bool) -> None:
    """Roles of engines are given for all PD engines or for none, and make a working split;
    ValueError if they do not."""
    roles: dict[str, EngineRole] = {}
    sites: set[str] = set()
    for cluster, table in clusters:
        for name, engine in table.engines.items():
            if table.role is ClusterRole.PD:
                roles[name] = engine.role
                sites.add(cluster)
            elif engine.role is not EngineRole.BOTH:
                raise ValueError(f"engine {name}: only PD engines have a role; {cluster} is PrfaaS")
    given = set(roles.values())
    if apart := [cluster for cluster, table in clusters if table.has_roles]:
        _check_apart(apart, clusters, given)
        if not given:
            return
    if given <= {EngineRole.BOTH}:
        if reroling:
            raise ValueError('routing.reroling needs PD engines with role = "prefill" or "decode"')
        return
    # With `has_roles` the engines of the other role may join later.
    if not apart and given != {EngineRole.PREFILL, EngineRole.DECODE}:
        shown = ", ".join(f"{name}: {role.value}" for name, role in roles.items())
        raise ValueError(
            'PD engines either all have role "both", or some "prefill" and the others "decode"; '
            f"they are {shown}"
        )
    if len(sites) > 1:
        shown = ", ".join(sorted(sites))
        raise ValueError(
            "PD engines with a role hand blocks over within a cluster; put them into one, they are "
            f"in {shown}"
        )


def _check_apart(
    apart: Sequence[str], clusters: Collection[tuple[str, ClusterTable]], given: set[EngineRole]
) -> None:
    """See that `has_roles` does not contradict the rest; ValueError if it does."""
    homes = [cluster for cluster, table in clusters if table.role is ClusterRole.PD]
    if apart != homes:
        raise ValueError(
            f"has_roles is set for {', '.join(apart)}, and the PD clusters are {', '.join(homes)}; "
            "engines with a role hand blocks over within the only PD cluster"
        )
    if EngineRole.BOTH in given:
        raise ValueError('has_roles is set, and a PD engine in the file has the role "both"')
