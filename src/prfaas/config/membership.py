"""The table of the sources of members that come and go."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from prfaas.config.names import FilePathText, PartName, Url
from prfaas.config.table import Table

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
