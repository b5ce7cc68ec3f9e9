"""The sources that a deployment file names."""

from __future__ import annotations

from prfaas.config.services import MembershipTable
from prfaas.membership.folder import Folder
from prfaas.membership.kubernetes import Kubernetes
from prfaas.membership.port import Source


def sources_of(table: MembershipTable, *, with_links: bool = False) -> list[Source]:
    """Sources in addition to the deployment file; ConfigError if the address of an API server is
    unknown.

    Args:
        with_links: Member files describe the links to pool nodes, too.
    """
    found: list[Source] = []
    if table.folder is not None:
        found.append(Folder(table.folder, with_links=with_links))
    if table.kubernetes is not None:
        found.append(Kubernetes(table.kubernetes))
    return found
