"""The deployment file as a source of members: a change is applied whole, or refused whole."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path

from prfaas.config.deployment import Deployment
from prfaas.core.membership.members import Listed
from prfaas.core.membership.rules import accepted
from prfaas.errors import ConfigError
from prfaas.membership.entries import entries_of, site_of
from prfaas.membership.port import OnList

POLL_S = 0.5
"""Time between two looks at a file; a change is read once two looks find the same content."""


class DeploymentFile:
    """The members in a deployment file.

    Args:
        paths: The file, and settings that take precedence over it.
        load: Reads and checks them.
        deployment: As it was read at the start.
        engines: URLs of engines that are given elsewhere.
        pools: Addresses of pool nodes that are given elsewhere.
        poll_s: Time between two looks, seconds.
    """

    name = "file"

    def __init__(
        self,
        paths: tuple[Path, ...],
        load: Callable[[], Deployment],
        deployment: Deployment,
        engines: dict[str, str],
        pools: dict[str, tuple[str, int]],
        poll_s: float = POLL_S,
    ) -> None:
        self._paths, self._load, self._fixed = paths, load, fixed_part(deployment)
        self._engines, self._pools, self._poll_s = engines, pools, poll_s
        self._site = site_of(deployment)
        self._started_with = {
            each.member.name: each.member for each in entries_of(deployment, engines, pools)
        }
        self.fault = ""
        self.current_at_s = 0.0

    async def follow(self, on_list: OnList) -> None:
        """See `Source`; the list of the start is the caller's."""
        taken = before = self._content()
        self.current_at_s = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(self._poll_s)
            now = await asyncio.to_thread(self._content)
            if now == before != taken:
                taken = now
                try:
                    on_list(await asyncio.to_thread(self._entries), ())
                    self.fault = ""
                except (ConfigError, ValueError) as error:
                    self.fault = f"the change is refused, the old members stay: {error}"
            before = now
            if not self.fault:
                self.current_at_s = asyncio.get_running_loop().time()

    def _entries(self) -> list[Listed]:
        """Read the file.

        Raises:
            ConfigError: It is wrong.
            ValueError: It changes more than members, or a member contradicts the others.
        """
        deployment = self._load()
        fixed = fixed_part(deployment)
        if changed := [key for key, value in fixed.items() if value != self._fixed.get(key)]:
            raise ValueError(
                f"{', '.join(changed)} cannot change while the gateway runs, only engines and "
                "pools of its clusters can; restart the gateway"
            )
        found = entries_of(deployment, self._engines, self._pools)
        _, refused = accepted(found, self._started_with, self._site)
        if refused:
            raise ValueError("; ".join(f"{each.name}: {each.words}" for each in refused))
        return found

    def _content(self) -> bytes:
        content = hashlib.sha256()
        for path in self._paths:
            # A missing file counts as different from any contents.
            with contextlib.suppress(OSError):
                data = path.read_bytes()
                content.update(b"%d:" % len(data) + data)
        return content.digest()


def fixed_part(deployment: Deployment) -> dict[str, object]:
    """Parts of a deployment file that may not change while a gateway runs, by key."""
    tables: dict[str, object] = {
        key: getattr(deployment, key) for key in type(deployment).model_fields if key != "clusters"
    }
    tables["names of clusters"] = set(deployment.clusters)
    for name, table in deployment.clusters.items():
        tables[f"clusters.{name}.role"] = table.role
    return tables
