"""Tables of a deployment file for what runs beside requests: `[audit]`, `[tracing]`,
`[supervision]`, and the sources of members that come and go.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from prfaas.config.names import COLLECTOR, TRACE_PAGE, FilePathText, PartName, Url
from prfaas.config.quantities import DurationNs, SizeBytes, Table, at_least, long_enough
from prfaas.units import format_seconds, format_size

ROTATE_BYTES_MIN = 64 << 10


class AuditTable(Table):
    """`[audit]`: an append-only log of block movements, operators' changes and refusals, one per
    process."""

    folder: FilePathText
    """Directory of the log files, `NAME.000001.jsonl` and on for each process; created if absent.
    """
    keys: FilePathText | None = None
    """Directory with the Ed25519 key `NAME.key` that signs the checkpoints of a process; created
    with mode 0600 if absent. If not set, `folder`: then who can change the log can also sign."""
    rotate: SizeBytes = 64 << 20
    """Size at which a new file begins; the chain continues in it."""
    keep: int = Field(default=0, ge=0, le=1_000_000)
    """Files that are kept; the log records each removal. 0 keeps all."""
    on_full: Literal["open", "closed"] = "open"
    """While the log cannot be written: "open" continues and counts lost records, "closed" refuses
    new transfers and operators' changes until it can."""
    checkpoint_lines: int = Field(default=1000, ge=1, le=1_000_000)
    """Lines after which a signed checkpoint is written."""
    checkpoint_interval: DurationNs = 10 * 10**9
    """Time after which one is written if there are new lines; the file is then synchronised."""

    _rotates = field_validator("rotate")(
        at_least(ROTATE_BYTES_MIN, "hold few lines", "64KiB", format_size)
    )
    _interval = field_validator("checkpoint_interval")(
        at_least(10**8, "would sign all the time", "100ms", format_seconds)
    )


class TracingTable(Table):
    """`[tracing]`: OpenTelemetry spans of requests, and of their transfers in pool nodes."""

    endpoint: str = Field(pattern=COLLECTOR)
    """Collector with OTLP over HTTP, such as "http://127.0.0.1:4318/v1/traces", for the gateway and
    the pool nodes of `prfaas up`; other pool nodes have `--tracing`."""
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of traced requests; the sampling decision of a client has precedence."""
    page: str | None = Field(default=None, pattern=TRACE_PAGE)
    """Address of a trace in your viewer, such as "https://jaeger.example/trace/{trace_id}"; the
    console links each request to it."""


class SupervisionTable(Table):
    """`[supervision]`: how `prfaas up` treats a part that fails."""

    start_timeout: DurationNs | None = None
    """Time limit of the start of a part; it is then stopped, and with `--restart` started again.

    If absent, 30 minutes for vLLM engines, two minutes for other parts.
    """
    restarts_max: int = Field(default=10, ge=0, le=1000)
    """Failures in a row after which `--restart` stops restarting a part; two minutes of readiness
    reset the count."""
    delay_max: DurationNs = 60 * 10**9
    """Longest delay between two starts of a part.

    The first delay is a second, each further one doubles, with a random factor between 0.5 and
    1.
    """

    _limits = field_validator("start_timeout", "delay_max")(long_enough)


NAMESPACE = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
SELECTOR = r"^[A-Za-z0-9][A-Za-z0-9 _./,=!()-]{0,499}$"
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


class KubernetesTable(Table):
    """`[membership.kubernetes]`: engines and pool nodes from EndpointSlices."""

    selector: Annotated[str, StringConstraints(pattern=SELECTOR)] = "prfaas/kind"
    """Label selector of the EndpointSlices, which have the labels of their Services."""
    namespace: Annotated[str, StringConstraints(pattern=NAMESPACE)] | None = None
    """Their namespace. If absent, the one in the service account's directory."""
    url: Url | None = None
    """URL of the API server. If absent, from the variables KUBERNETES_SERVICE_HOST and
    KUBERNETES_SERVICE_PORT, as every pod has them."""
    service_account: FilePathText = Field(default=SERVICE_ACCOUNT, validate_default=True)
    """Directory with `token` and `ca.crt`; the token is read again for each request."""


class NeedsIdentity(StrEnum):
    """Engines from other sources than the deployment file that need an https URL."""

    FILES = "files"
    """Those of member files, unless they are on this machine."""
    ALL = "all"
    """Those of EndpointSlices too."""
    NONE = "none"

    @property
    def sources(self) -> frozenset[str]:
        """Names of the sources."""
        files = frozenset({"folder"})
        return {self.FILES: files, self.ALL: files | {"kubernetes"}}.get(self, frozenset())


class MembershipTable(Table):
    """`[membership]`: sources of engines and pool nodes in addition to the file's own."""

    folder: FilePathText | None = None
    """Directory with a file NAME.toml for each member, read again when it changes."""
    kubernetes: KubernetesTable | None = None
    """EndpointSlices of a Kubernetes cluster."""

    identity: Annotated[NeedsIdentity, Field(strict=False)] = NeedsIdentity.FILES
    """Engines that need an `https` URL, and so a certificate, unless they are on this machine:
    `"files"` (those of `folder`), `"all"` or `"none"`. Others get no prompt and no cache salt."""

    @property
    def has_sources(self) -> bool:
        """Return True if members can come from elsewhere than the file."""
        return self.folder is not None or self.kubernetes is not None


class PeersFile(MembershipTable):
    """The file of `prfaas pool --peers-from`: sources of peers, without a deployment file."""

    targets: list[PartName] = Field(default=[], max_length=64)
    """Clusters to whose pool nodes this one pushes."""
    sources: list[PartName] = Field(default=[], max_length=64)
    """Clusters whose pool nodes may push to this one."""

    @model_validator(mode="after")
    def _names_something(self) -> PeersFile:
        if not self.has_sources:
            raise ValueError("there is neither `folder` nor [kubernetes]; name a source of members")
        if not self.targets and not self.sources:
            raise ValueError("`targets` and `sources` are empty; name the clusters of the peers")
        return self
