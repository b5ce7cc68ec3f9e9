"""The sources that a deployment file names."""

from __future__ import annotations

from prfaas.config.membership import MembershipTable
from prfaas.membership.folder import Folder
from prfaas.membership.kubernetes import Kubernetes
from prfaas.membership.port import Source


def sources_of(table: MembershipTable) -> list[Source]:
    """Sources in addition to the deployment file.

    Raises:
        ConfigError: The address of an API server is unknown.
    """
    found: list[Source] = []
    if table.folder is not None:
        found.append(Folder(table.folder))
    if table.kubernetes is not None:
        found.append(Kubernetes(table.kubernetes))
    return found
