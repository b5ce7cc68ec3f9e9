"""The deployment file: every part of a deployment, where it runs, and how it is reached.

One format serves a laptop and two sites. A part that `prfaas up` starts has a `listen` address (or
none, then a free loopback port is taken); a part that runs elsewhere has the `url` or `address` at
which it is reached.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from prfaas.config.quantities import DurationNs, RateBitsPerS, SizeBytes
from prfaas.config.table import Table
from prfaas.config.tenants import KEY_HASH, TENANTS_MAX, KeyHashes, TenantTable, check_keys
from prfaas.config.tracing import TracingTable
from prfaas.core.policies import PolicyName

FilePathText = Annotated[Path, Field(strict=False)]
PART_NAME = r"^[a-z][a-z0-9-]{0,62}$"
HOST_PORT = r"^(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$"
URL = r"^https?://[^/]+$"
ZMQ = r"^(tcp://(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}|ipc://[^@\s][^\s]{0,99})$"
PATTERNS = {
    ZMQ: 'tcp://HOST:PORT or ipc://PATH, as in "ipc:///run/prfaas/prefill-events"',
    PART_NAME: "a name: lower-case letters, digits, dashes; a letter first; 63 characters at most",
    HOST_PORT: 'HOST:PORT, as in "127.0.0.1:8000"',
    KEY_HASH: '"sha256:" and 64 hex digits, as `prfaas tenant key` prints it',
    URL: 'http:// or https:// with a host and no path, as in "https://prefill.example.net:8100"',
}
"""What an operator is told of each."""

PartName = Annotated[str, StringConstraints(pattern=PART_NAME)]
PORT_MAX = 65535
TIMING_MARK = "timing"
"""What the name of a model contains that timing engines serve."""


def _has_port(text: str) -> str:
    if int(text.rpartition(":")[2]) > PORT_MAX:
        raise ValueError(f"{text!r} has a port over {PORT_MAX}")
    return text


HostPort = Annotated[str, StringConstraints(pattern=HOST_PORT), AfterValidator(_has_port)]


class ModelTable(Table):
    """`[model]`: what is served."""

    name: str = Field(min_length=1, max_length=256)
    """Name that clients ask for."""
    path: str = Field(min_length=1)
    """Checkpoint directory, or a name the engine knows; the gateway needs its tokenizer."""
    generate: bool = False
    """Make the small random-weight hybrid checkpoint at `path` if nothing is there."""
    chat_endpoint: bool = False
    """Send every chat to the engines' chat endpoint, where vLLM parses reasoning; it is so where an
    engine started here has `--reasoning-parser` among its `args`."""


class GatewayTable(Table):
    """`[gateway]`: the HTTP edge."""

    name: PartName = "gateway"
    """Its name in the certificate that pool nodes and engines ask for."""
    listen: HostPort = "127.0.0.1:8000"
    """Where clients come; port 0 takes a free one."""
    replicas: dict[PartName, HostPort] = Field(default={})
    """Further gateways of this deployment by name, and where clients come. `prfaas gateway FILE
    --name NAME` starts each; all need the same `tenant.salt` in their `state`."""
    body_bytes_max: SizeBytes = 8 * 2**20
    """Larger request bodies are refused with 413."""
    request_timeout: DurationNs = 600 * 10**9
    """A request that takes longer is ended with 504."""
    drain_timeout: DurationNs = 30 * 10**9
    """How long requests under way may go on when the gateway is told to stop."""
    connect_timeout: DurationNs = 2 * 10**9
    """An engine that does not take a connection in this time counts as absent."""
    requests_max: int = Field(default=4096, ge=1, le=1_000_000)
    """Requests in flight; more are refused with 429, and tenants share the places fairly."""
    operator_keys: KeyHashes = Field(default=[])
    """Hashes of the keys that open `/metrics`, `/control` and `/kv`, as `prfaas tenant key` prints
    them. Without any they are open to this machine while `listen` is a loopback address, and to all
    who reach the gateway while there are no tenants."""


class RoutingTable(Table):
    """`[routing]`: who prefills what."""

    offload_threshold: int = Field(ge=0)
    """Incremental length, tokens, above which a prompt is prefilled in the PrfaaS cluster."""
    policy: Annotated[PolicyName, Field(strict=False)] | None = None
    """"local" never offloads, "remote" always does, "paper" compares with `offload_threshold`,
    "adaptive" overrules the threshold where the other path is predicted to be clearly faster.
    Without it: adaptive if there is a `plan` to predict from, else paper."""
    plan: FilePathText | None = None
    """Plan file of `prfaas plan` with the instances' profiles, from which paths are predicted; its
    PrfaaS clusters are found by name, a single one stands for all. "adaptive" needs it."""
    short_term_loop: bool = False
    """Let the threshold of "adaptive" follow queues and links; needs a `plan`."""
    reroling: bool = False
    """Let PD engines change between prefill and decode as the load asks for; needs a `plan`, and
    engines with the role "prefill" or "decode". Of several gateways one may do so."""
    replication: Annotated[RateBitsPerS, Field(ge=1_000_000)] | None = None
    """What copies of hot prefixes may take of each link on average, such as "200Mbps": what home
    misses again and again and a PrfaaS cluster holds is copied home. Needs a `plan`; without
    this nothing is copied."""
    ttft_max: DurationNs | None = None
    """Refuse with 429 what is predicted to take longer to its first token; needs a `plan`."""
    prefill_timeout: DurationNs = 60 * 10**9
    """A remote prefill that takes longer is given up; the prompt is prefilled locally."""
    transfer_timeout: DurationNs = 10 * 10**9
    """How long decode waits for blocks after the prefill leg has answered."""

    @model_validator(mode="after")
    def _can_predict(self) -> RoutingTable:
        if self.ttft_max is not None and self.plan is None:
            raise ValueError("ttft_max needs a plan: without profiles nothing is predicted")
        if self.policy is PolicyName.ADAPTIVE and self.plan is None:
            raise ValueError(
                'policy = "adaptive" needs a plan: without profiles nothing is predicted; name one '
                'with plan = "FILE", or say policy = "paper"'
            )
        if self.short_term_loop and self.plan is None:
            raise ValueError(
                "short_term_loop needs a plan: it moves the threshold of adaptive routing, which "
                "predicts from one; without it the threshold stays"
            )
        if self.replication is not None and self.plan is None:
            raise ValueError("replication needs a plan: it weighs prefill time against bytes")
        if self.reroling and self.plan is None:
            raise ValueError("reroling needs a plan: it weighs the splits that the plan knows")
        return self

    @property
    def effective_policy(self) -> PolicyName:
        """`policy`, or what stands in for it."""
        if self.policy is not None:
            return self.policy
        return PolicyName.PAPER if self.plan is None else PolicyName.ADAPTIVE


class SecurityTable(Table):
    """`[security]`: identities."""

    identities: FilePathText
    """Directory with `ca.pem` and a `NAME.pem`, `NAME.key` pair for every part started here."""
    generate: bool = False
    """Make missing identities, the authority included. For one machine only."""


class LinkTable(Table):
    """`[clusters.CLUSTER.pools.POOL.links.PEER]`: the link over which a pool pushes to PEER."""

    budget: Annotated[RateBitsPerS, Field(ge=1_000_000)] | None = None
    """What it may send, such as "1Gbps": at most 93 % of what the path carries leaves its queues
    empty."""
    connections: int | None = Field(default=None, ge=1, le=16)
    """Data connections; without it, as many as rate and round trip ask for."""


POOL_BYTES_MIN = 1 << 20


class PoolTable(Table):
    """`[clusters.CLUSTER.pools.POOL]`: a pool node."""

    memory: SizeBytes = 2**30
    """Bytes of KV blocks held in host memory."""
    disk: FilePathText | None = None
    """Folder for blocks that memory has no room for, on a disk of the host; none without it."""
    disk_limit: SizeBytes | None = None
    """Bytes of files in that folder; has to be given with `disk`."""
    listen: HostPort | None = None
    """Where it accepts links, if `prfaas up` starts it."""
    address: HostPort | None = None
    """Where it is reached, if it is started elsewhere."""
    links: dict[PartName, LinkTable] = Field(default={})
    """Settings of links to the pool nodes it pushes to."""

    @field_validator("disk", mode="before")
    @classmethod
    def _disk_is_named(cls, value: object) -> object:
        if value == "":
            raise ValueError("it is empty; name a folder, or leave `disk` and `disk_limit` out")
        return value

    @field_validator("memory", "disk_limit")
    @classmethod
    def _holds_a_block(cls, value: int | None) -> int | None:
        if value is not None and value < POOL_BYTES_MIN:
            raise ValueError(f"{value} bytes hold no block; the least is {POOL_BYTES_MIN}")
        return value

    @model_validator(mode="after")
    def _disk_has_a_limit(self) -> PoolTable:
        if (self.disk is None) != (self.disk_limit is None):
            raise ValueError("give `disk` and `disk_limit` together, or neither")
        return self

    @model_validator(mode="after")
    def _one_place(self) -> PoolTable:
        if self.listen and self.address:
            raise ValueError("give `listen` (started here) or `address` (started elsewhere)")
        return self


class EngineRole(StrEnum):
    """What an engine of a PD cluster does; every engine can do both."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class EngineTable(Table):
    """`[clusters.CLUSTER.engines.ENGINE]`: a vLLM instance."""

    pool: PartName
    """The pool node on its host."""
    role: Annotated[EngineRole, Field(strict=False)] = EngineRole.BOTH
    """In a PD cluster: "prefill" computes the prompts that stay at home, "decode" decodes, "both"
    does both for the same request. All PD engines are "both", or none is; then they share one pool
    node. With `routing.reroling` it is the role at first."""
    listen: HostPort | None = None
    """Where it serves, if `prfaas up` starts it."""
    url: str | None = Field(default=None, pattern=URL)
    """Where it is reached, if it is started elsewhere; https for another site."""
    host_memory: SizeBytes = 2**30
    """Memory shared between the engine and its pool node."""
    cpus: str = ""
    """Cores the engine is bound to, on machines without a GPU: "0" or "0-3"."""
    kv_cache_memory: SizeBytes = 2**30
    """Memory for the KV cache, on machines without a GPU."""
    kv_events: Annotated[str, StringConstraints(pattern=ZMQ)] | None = None
    """Where it publishes what its device memory holds: "ipc://PATH" on this machine, which `prfaas
    up` has it do, or "tcp://HOST:PORT" of one started elsewhere. The events carry prompts in the
    clear: keep them inside the cluster."""
    kv_events_replay: Annotated[str, StringConstraints(pattern=ZMQ)] | None = None
    """Where it repeats events to who missed some; needs `kv_events`."""
    args: list[str] = Field(default=[])
    """Further arguments for the engine."""
    env: dict[str, str] = Field(default={})
    """Further environment variables for the engine."""

    @model_validator(mode="after")
    def _one_place(self) -> EngineTable:
        if self.listen and self.url:
            raise ValueError("give `listen` (started here) or `url` (started elsewhere)")
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
    """Plan file of `prfaas plan` that says how long an instance of the cluster takes."""
    time_scale: float = Field(default=1.0, gt=0)
    """Seconds of the wall clock for a second of the plan: 0.1 is ten times as fast."""
    bytes_scale: float = Field(default=1.0, gt=0)
    """Size of KV blocks, as a share of the model's: 0.01 is a hundredth."""
    block_tokens: int = Field(default=512, ge=16)
    """Tokens of a block."""
    cache_tokens: int = Field(default=1_000_000, ge=1)
    """Room of each engine's own prefix cache, tokens."""
    max_model_len: int = Field(default=131_072 + 8_192, ge=1)
    """Longest sequence, tokens."""
    stream_interval: int = Field(default=1, ge=1)
    """Tokens of a chunk of a stream, after the first."""
    one_process: bool = False
    """Run all engines of a pool in one process."""


class ClusterRole(StrEnum):
    """What a cluster is for."""

    PRFAAS = "prfaas"
    """Remote, prefill only."""
    PD = "pd"
    """Local: prefill and decode."""


class ClusterTable(Table):
    """`[clusters.CLUSTER]`: a site."""

    role: Annotated[ClusterRole, Field(strict=False)]
    """"prfaas": remote, prefill only; "pd": local, prefill and decode."""
    pools: Annotated[dict[PartName, PoolTable], Field(min_length=1)]
    engines: Annotated[dict[PartName, EngineTable], Field(min_length=1)]
    timing: TimingTable | None = None
    """Makes the engines that are started here timing engines, which compute nothing."""

    @model_validator(mode="after")
    def _pools_exist(self) -> ClusterTable:
        for name, engine in self.engines.items():
            if engine.pool not in self.pools:
                known = ", ".join(self.pools)
                raise ValueError(f"engine {name}: pool {engine.pool!r} is not one of {known}")
        return self


def check_roles(clusters: Iterable[tuple[str, ClusterTable]], *, reroling: bool) -> None:
    """Roles of engines are given for all PD engines or for none, and make a working split.

    Raises:
        ValueError: They do not.
    """
    roles: dict[str, EngineRole] = {}
    pools: set[str] = set()
    for cluster, table in clusters:
        for name, engine in table.engines.items():
            if table.role is ClusterRole.PD:
                roles[name] = engine.role
                pools.add(engine.pool)
            elif engine.role is not EngineRole.BOTH:
                raise ValueError(f"engine {name}: only PD engines have a role; {cluster} is PrfaaS")
    given = set(roles.values())
    if given <= {EngineRole.BOTH}:
        if reroling:
            raise ValueError('routing.reroling needs PD engines with role = "prefill" or "decode"')
        return
    if given != {EngineRole.PREFILL, EngineRole.DECODE}:
        shown = ", ".join(f"{name}: {role.value}" for name, role in roles.items())
        raise ValueError(
            'PD engines either all have role "both", or some "prefill" and the others "decode"; '
            f"they are {shown}"
        )
    if len(pools) > 1:
        shown = ", ".join(sorted(pools))
        raise ValueError(
            "PD engines with a role hand blocks over within a pool node; give them one, they have "
            f"{shown}"
        )


class Deployment(Table):
    """A whole deployment file."""

    model: ModelTable
    gateway: GatewayTable = GatewayTable()
    routing: RoutingTable
    security: SecurityTable
    tracing: TracingTable | None = None
    state: FilePathText = Path(".state")
    """Directory for sockets, logs, the secret that salts come from, and what is generated."""
    tenants: dict[PartName, TenantTable] = Field(default={}, max_length=TENANTS_MAX)
    """Who may use it. Without any, everybody who reaches `gateway.listen` may, without a key."""
    clusters: Annotated[dict[PartName, ClusterTable], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_are_unique(self) -> Deployment:
        names = self.gateways
        for cluster in self.clusters.values():
            names += [*cluster.pools, *cluster.engines]
        doubles = sorted({name for name in names if names.count(name) > 1})
        if doubles:
            raise ValueError(f"two parts are called {', '.join(doubles)}; names are identities")
        return self

    @model_validator(mode="after")
    def _keys_have_one_owner(self) -> Deployment:
        check_keys(self.tenants, self.gateway.operator_keys)
        return self

    @model_validator(mode="after")
    def _links_exist(self) -> Deployment:
        targets = [name for cluster in self.with_role(ClusterRole.PD) for name in cluster.pools]
        for cluster in self.clusters.values():
            peers = targets if cluster.role is ClusterRole.PRFAAS else []
            for name, pool in cluster.pools.items():
                for peer in pool.links:
                    if peer not in peers:
                        known = ", ".join(peers) or "nobody"
                        raise ValueError(
                            f"pool {name} has no link to {peer!r}; it pushes to {known}"
                        )
        return self

    @model_validator(mode="after")
    def _says_what_it_is(self) -> Deployment:
        timing = any(cluster.timing for cluster in self.clusters.values())
        if timing and TIMING_MARK not in self.model.name.lower():
            raise ValueError(
                f"model.name is {self.model.name!r}: timing engines compute nothing, and the name "
                f"of their model has to say so; put {TIMING_MARK!r} into it"
            )
        return self

    @model_validator(mode="after")
    def _has_decode(self) -> Deployment:
        if not any(cluster.role is ClusterRole.PD for cluster in self.clusters.values()):
            raise ValueError('no cluster has role = "pd": nothing could decode')
        return self

    @model_validator(mode="after")
    def _roles_fit(self) -> Deployment:
        check_roles(self.clusters.items(), reroling=self.routing.reroling)
        return self

    @property
    def gateways(self) -> list[str]:
        """Names of all gateways."""
        return [self.gateway.name, *self.gateway.replicas]

    def run_by(self, gateway: str) -> Deployment:
        """The same deployment, as one of its gateways runs it.

        Raises:
            KeyError: There is no such gateway.
        """
        if gateway == self.gateway.name:
            return self
        update = {"name": gateway, "listen": self.gateway.replicas[gateway]}
        return self.model_copy(update={"gateway": self.gateway.model_copy(update=update)})

    @property
    def needs_chat_endpoint(self) -> bool:
        """Whether only the engines' chat endpoint gives the right answer to any chat."""
        args = [
            arg
            for cluster in self.clusters.values()
            for engine in cluster.engines.values()
            for arg in engine.args
        ]
        parses = any(arg.partition("=")[0] == "--reasoning-parser" for arg in args)
        return self.model.chat_endpoint or parses

    def with_role(self, role: ClusterRole) -> list[ClusterTable]:
        """All clusters of a role."""
        return [cluster for cluster in self.clusters.values() if cluster.role is role]
