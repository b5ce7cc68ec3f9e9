"""The deployment file: every part of a deployment, where it runs, and how it is reached.

One format serves a laptop and two sites. A part that `prfaas up` starts has a `listen` address (or
none, then a free loopback port is taken); a part that runs elsewhere has the `url` or `address` at
which it is reached. `prfaas gateway` and `prfaas pool` run one part of the same file.
"""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints, field_validator, model_validator

from prfaas.config.clusters import ClusterRole, ClusterTable, EngineRole, PoolTable, check_roles
from prfaas.config.engine_args import values_of
from prfaas.config.engines.block_tokens import BLOCK_TOKENS_MAX, check_block_tokens
from prfaas.config.governance.residency import check_regions, residency_of
from prfaas.config.market.prices import (
    CLASSES_MAX,
    ClassTable,
    PriceTable,
    check_classes,
    check_prices,
)
from prfaas.config.names import FilePathText, HostPort, PartName
from prfaas.config.quantities import (
    DurationNs,
    SizeBytes,
    Table,
    age_long_enough,
    at_least,
    long_enough,
)
from prfaas.config.routing import RoutingTable
from prfaas.config.services import AuditTable, MembershipTable, SupervisionTable, TracingTable
from prfaas.config.tenants import (
    TENANTS_MAX,
    UNNAMED_OPERATOR,
    KeyHashes,
    OperatorTable,
    RequestFields,
    TenantTable,
    check_keys,
    check_shares,
)
from prfaas.core.transfer.residency import Regions, Residency
from prfaas.errors import ConfigError
from prfaas.units import format_size

OPERATORS_MAX = 100
TIMING_MARK = "timing"
"""Part of the name of a model of timing engines."""


MediaDomain = Annotated[str, StringConstraints(pattern=r"^(\*|[A-Za-z0-9.:-]{1,253})$")]


class ModelTable(Table):
    """`[model]`: the served model."""

    name: str = Field(min_length=1, max_length=256)
    """Name of the model in requests."""
    path: str = Field(min_length=1)
    """Checkpoint directory, or a name that the engine resolves; the gateway needs its tokenizer."""
    generate: bool = False
    """Create the small random-weight hybrid checkpoint at `path` if it does not exist."""
    chat_endpoint: bool = False
    """Send every chat to the engines' chat endpoint, where vLLM parses reasoning.

    Implied by `--reasoning-parser` in the `args` of an engine started here.
    """

    block_tokens: Annotated[int, Field(ge=16, le=BLOCK_TOKENS_MAX)] | None = None
    """Tokens of the blocks that sites share, a multiple of the block size of each engine. Needed
    where their `--block-size` differs; absent, engines share their own blocks."""
    media_domains: Annotated[list[MediaDomain], Field(max_length=256)] = Field(default=[])
    """Hosts from which engines may fetch images, audio and video by URL; "*" allows any name
    outside private networks. If empty, only "data:" URLs are accepted. Engines started here get the
    list as `--allowed-media-domains`."""

    @field_validator("name")
    @classmethod
    def _is_printable(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError(f"{value!r} holds characters that cannot be printed")
        return value


class ClientTlsTable(Table):
    """`[gateway.tls]`: HTTPS for clients. Files that change are taken up within seconds."""

    certificate: FilePathText
    """PEM file: the certificate of the name that clients use, then its chain."""
    key: FilePathText
    """PEM file with its key, readable by the gateway's user only, without a password."""


Origin = Annotated[
    str, Field(pattern=r"^(\*|null|[a-z][a-z0-9+.-]*://[^/\s]{1,260})$", max_length=300)
]
"""An origin as browsers send it: scheme, host and port, without a path."""


class GatewayTable(Table):
    """`[gateway]`: the HTTP edge."""

    name: PartName = "gateway"
    """Name in the certificate that pool nodes and engines require."""
    listen: HostPort = "127.0.0.1:8000"
    """Address for clients; port 0 selects a free port. `[::]:8000` is every address of IPv6 and of
    IPv4."""
    tls: ClientTlsTable | None = None
    """HTTPS for clients, with `certificate` and `key`. Plain HTTP if absent."""
    replicas: dict[PartName, HostPort] = Field(default={})
    """Further gateways of this deployment: name and address for clients. `prfaas gateway FILE
    --name NAME` starts each; all need the same `tenant.salt` in their `state`."""
    allowed_origins: list[Origin] = Field(default=[])
    """Origins of web pages that may send requests of clients from a browser (CORS), such as
    `"https://chat.example.net"`; `"*"` is all. None by default."""
    body_bytes_max: SizeBytes = 8 * 2**20
    """Limit of request bodies; larger ones are refused with 413."""
    body_timeout: DurationNs = 60 * 10**9
    """Time limit for receiving a request body; a slower one is refused with 408."""
    request_timeout: DurationNs = 600 * 10**9
    """Time limit of a request; longer ones end with 504."""
    lame_duck: DurationNs = 10 * 10**9
    """Time after SIGTERM in which `/health` answers 503 and new requests are still served: as long
    as load balancers take to notice. "0s" refuses them at once, as Ctrl-C does."""
    drain_timeout: DurationNs = 30 * 10**9
    """Time for running requests to complete when the gateway stops."""
    connect_timeout: DurationNs = 2 * 10**9
    """Time limit of a connection to an engine; a slower engine counts as absent."""
    workers: int = Field(default=1, ge=1, le=64)
    """Processes that serve clients on the port. With one, the gateway's own does; with more, it
    decides, and they read, tokenise and stream."""
    requests_max: int = Field(default=4096, ge=1, le=1_000_000)
    """Requests in flight, counted by their prompts times `n`; more are refused with 429, and
    tenants share them fairly."""
    consoles_max: int = Field(default=32, ge=1, le=1000)
    """Open pages of the console; more are refused with 429."""
    operator_keys: KeyHashes = Field(default=[])
    """Hashes of the keys for `/metrics`, `/control` and `/kv`, as printed by `prfaas tenant key`;
    the audit log calls their owners "operator". `[operators.OPERATOR]` has keys with names.
    Without any key, these endpoints are open to this machine if `listen` is a loopback address, and
    to all clients if there are no tenants."""

    request_names: SizeBytes = 32 * 2**20
    """Memory for the names of the blocks of recent prompts, which `prfaas ctl prefix` and
    `purge --prefix-of` need: 32 bytes for each block, of 10,000 requests at most. "0B" keeps
    none."""
    cache_max_age: DurationNs | None = None
    """Largest age of blocks of tenants without their own `cache_max_age`; no limit if absent."""

    request_fields: RequestFields = Field(default=[])
    """Fields of request bodies that reach the engines in addition to those of OpenAI's API and
    vLLM's sampling fields, such as "priority"; others are refused with 400."""

    @property
    def scheme(self) -> str:
        """Scheme of the URLs of this gateway."""
        return "https" if self.tls else "http"

    _limits = field_validator("body_timeout", "request_timeout", "connect_timeout")(long_enough)
    _age = field_validator("cache_max_age")(age_long_enough)
    _body = field_validator("body_bytes_max")(
        at_least(1024, "hold no request", "1KiB", format_size)
    )


class SecurityTable(Table):
    """`[security]`: identities."""

    identities: FilePathText
    """Directory with `ca.pem` and a `NAME.pem`, `NAME.key` pair for every part started on this
    machine."""
    generate: bool = False
    """Create missing identities, the authority included. Only for a single machine."""


class Deployment(Table):
    """A whole deployment file."""

    model: ModelTable
    gateway: GatewayTable = GatewayTable()
    routing: RoutingTable
    security: SecurityTable
    tracing: TracingTable | None = None
    audit: AuditTable | None = None
    supervision: SupervisionTable = SupervisionTable()
    membership: MembershipTable = MembershipTable()
    state: FilePathText = Path(".state")
    """Directory for sockets, logs, the secret of the salts, and generated files."""
    tenants: dict[PartName, TenantTable] = Field(default={}, max_length=TENANTS_MAX)
    """Tenants. Without any, all clients can use it without a key."""
    operators: dict[PartName, OperatorTable] = Field(default={}, max_length=OPERATORS_MAX)
    """Operators with keys of their own."""
    classes: dict[PartName, ClassTable] = Field(default={}, max_length=CLASSES_MAX)
    """Classes of service. Without any, `service_tier` of requests is ignored."""
    prices: dict[PartName, PriceTable] = Field(default={})
    """Prices of the clusters, for the policy "cost" and the metrics of cost; those of the plan if
    absent."""
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
        check_keys(self.tenants, self.operators, self.gateway.operator_keys)
        check_shares(self.tenants)
        return self

    @model_validator(mode="after")
    def _market_fits(self) -> Deployment:
        check_prices(self.prices, self.clusters)
        if self.prices and self.routing.plan is None:
            raise ValueError("prices: they need a plan, which has the times and bytes of prompts")
        check_classes(self.classes, self.tenants, has_plan=self.routing.plan is not None)
        return self

    @model_validator(mode="after")
    def _links_exist(self) -> Deployment:
        for name, pool in self.pools.items():
            peers = self.destinations(name)
            for peer in pool.links:
                if peer not in peers:
                    known = ", ".join(peers) or "nobody"
                    raise ValueError(f"pool {name} has no link to {peer!r}; it pushes to {known}")
        return self

    @model_validator(mode="after")
    def _says_what_it_is(self) -> Deployment:
        timing = any(cluster.timing for cluster in self.clusters.values())
        if timing and TIMING_MARK not in self.model.name.lower():
            raise ValueError(
                f"model.name is {self.model.name!r}: timing engines compute nothing, and the name "
                f"of their model has to show it; put {TIMING_MARK!r} into it"
            )
        if timing and self.routing.verify_one_in is not None:
            raise ValueError(
                "routing.verify_one_in: blocks of timing engines depend on the salt of a request, "
                "so that honest ones would count as altered; remove the key"
            )
        return self

    @model_validator(mode="after")
    def _blocks_fit(self) -> Deployment:
        engines = {
            name: (engine.args, engine.kv_events is not None)
            for cluster in self.clusters.values()
            if not cluster.timing
            for name, engine in cluster.engines.items()
        }
        check_block_tokens(engines, self.model.block_tokens)
        return self

    @model_validator(mode="after")
    def _has_decode(self) -> Deployment:
        if not any(cluster.role is ClusterRole.PD for cluster in self.clusters.values()):
            raise ValueError('no cluster has role = "pd": nothing could decode')
        return self

    @model_validator(mode="after")
    def _has_parts(self) -> Deployment:
        for name, cluster in self.clusters.items() if not self.membership.has_sources else ():
            for kind in ("pools", "engines"):
                if not getattr(cluster, kind):
                    raise ValueError(
                        f"clusters.{name}.{kind} is empty; list one at least, or name a source "
                        "of members in [membership]"
                    )
        return self

    @model_validator(mode="after")
    def _budgets_have_holders(self) -> Deployment:
        for name, cluster in self.clusters.items() if self.membership.has_sources else ():
            if cluster.link_budget:
                raise ValueError(
                    f"clusters.{name}.link_budget is shared by the pool nodes that the file lists, "
                    "and [membership] may add others; give the links of each a `budget` instead"
                )
        return self

    @model_validator(mode="after")
    def _regions_fit(self) -> Deployment:
        check_regions(self.clusters, self.tenants)
        return self

    @model_validator(mode="after")
    def _roles_fit(self) -> Deployment:
        check_roles(self.clusters.items(), reroling=self.routing.reroling)
        return self

    @property
    def residency(self) -> Residency:
        """Regions of clusters and tenants."""
        return residency_of(self.clusters, self.tenants)

    def check_one_local(self) -> None:
        """Check that a gateway can run the deployment: its requests are decoded in one cluster;
        ConfigError if there are several PD clusters."""
        names = list(self.clusters_of(ClusterRole.PD))
        if len(names) > 1:
            raise ConfigError(
                f"clusters: {', '.join(names)} have the role pd, and a gateway has one PD cluster; "
                "put their engines and pool nodes into one, which can have several hosts, or give "
                "each a gateway of its own"
            )

    @property
    def gateway_regions(self) -> Regions:
        """Regions that the certificates of its gateways have to name."""
        return self.residency.signed_by_gateways(self.tenants or [""])

    @property
    def has_roles(self) -> bool:
        """PD engines prefill or decode, and none does both."""
        local = self.with_role(ClusterRole.PD)
        roles = {engine.role for cluster in local for engine in cluster.engines.values()}
        return EngineRole.BOTH not in roles if roles else any(each.has_roles for each in local)

    @property
    def gateways(self) -> list[str]:
        """Names of all gateways."""
        return [self.gateway.name, *self.gateway.replicas]

    @property
    def operator_keys(self) -> list[tuple[str, str]]:
        """Hashes of all operators' keys, each with the operator's name."""
        named = [(key, name) for name, table in self.operators.items() for key in table.keys]
        return named + [(key, UNNAMED_OPERATOR) for key in self.gateway.operator_keys]

    def run_by(self, gateway: str) -> Deployment:
        """The same deployment, as one of its gateways runs it; KeyError if there is no such
        gateway."""
        if gateway == self.gateway.name:
            return self
        update = {"name": gateway, "listen": self.gateway.replicas[gateway]}
        return self.model_copy(update={"gateway": self.gateway.model_copy(update=update)})

    @property
    def needs_chat_endpoint(self) -> bool:
        """Return True if only the engines' chat endpoint gives the right answer to any chat."""
        args = [
            arg
            for cluster in self.clusters.values()
            for engine in cluster.engines.values()
            for arg in engine.args
        ]
        parses = any(arg.partition("=")[0] == "--reasoning-parser" for arg in args)
        return self.model.chat_endpoint or parses

    @property
    def response_role(self) -> str:
        """Role of answers to chats: `--response-role` of the PD engines."""
        return next(iter(self._of_pd_engines("--response-role")), "assistant")

    @property
    def forces_usage(self) -> bool:
        """True if each stream ends with its usage: `--enable-force-include-usage`."""
        return bool(self._of_pd_engines("--enable-force-include-usage"))

    def _of_pd_engines(self, option: str) -> list[str]:
        """Values that an argument of PD engines has; vLLM takes the last one of an engine."""
        engines = [
            each for table in self.with_role(ClusterRole.PD) for each in table.engines.values()
        ]
        found = [list(values_of(engine.args, (option,))) for engine in engines]
        return [values[-1] for values in found if values]

    def pool_socket(self, pool: str) -> Path:
        """Unix socket of a pool node, for the engines of its host."""
        return self.pools[pool].socket or self.state / f"{pool}.sock"

    @property
    def pools(self) -> dict[str, PoolTable]:
        """Pool nodes of all clusters by name."""
        clusters = self.clusters.values()
        return {name: pool for cluster in clusters for name, pool in cluster.pools.items()}

    @property
    def links(self) -> list[tuple[str, str]]:
        """Links between pool nodes, as source and destination: from each PrfaaS pool node to each
        of a PD cluster, and between those of one cluster in both directions."""
        local, remote = self.with_role(ClusterRole.PD), self.with_role(ClusterRole.PRFAAS)
        far = [name for cluster in remote for name in cluster.pools]
        between = [(source, target) for source in far for target in self.local_pools]
        within = [pair for each in (*local, *remote) for pair in permutations(each.pools, 2)]
        return between + within

    @property
    def local_pools(self) -> list[str]:
        """Pool nodes of PD clusters."""
        return [name for cluster in self.with_role(ClusterRole.PD) for name in cluster.pools]

    def destinations(self, pool: str) -> list[str]:
        """Pool nodes to which a pool node keeps a link."""
        return [target for source, target in self.links if source == pool]

    def with_role(self, role: ClusterRole) -> list[ClusterTable]:
        """All clusters of a role."""
        return list(self.clusters_of(role).values())

    def clusters_of(self, role: ClusterRole) -> dict[str, ClusterTable]:
        """All clusters of a role, by name."""
        return {name: table for name, table in self.clusters.items() if table.role is role}
