"""A directory of member files as a source: NAME.toml describes the member NAME."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from prfaas.config.clusters import EngineRole
from prfaas.config.names import PART_NAME, PATTERNS, ZMQ, HostPort, PartName, Url
from prfaas.config.quantities import RateBitsPerS, Table
from prfaas.core.membership.members import Listed, Member, MemberKind, RefusalCause, RefusedEntry
from prfaas.errors import ConfigError
from prfaas.membership.entries import link_settings
from prfaas.membership.port import OnList
from prfaas.toml_tables import read_toml, validated

FILES_MAX = 4096
FILE_BYTES_MAX = 64 << 10
POLL_S = 0.5
"""Time between two looks at the directory."""
Stamp = tuple[int, int, int]
NO_STAMP: Stamp = (-1, -1, -1)


class MemberFile(Table):
    """`NAME.toml`: an engine or a pool node."""

    kind: Literal["engine", "pool"]
    cluster: str = Field(min_length=1, max_length=63)
    url: Url | None = None
    """URL of an engine."""
    address: HostPort | None = None
    """Address of a pool node."""
    pool: PartName | None = None
    """Pool node of an engine."""
    role: Annotated[EngineRole, Field(strict=False)] = EngineRole.BOTH
    model: str = Field(default="", max_length=256)
    """Served model; a member with another one than the site's is refused."""
    kv_events: Annotated[str, StringConstraints(pattern=ZMQ)] | None = None
    kv_events_replay: Annotated[str, StringConstraints(pattern=ZMQ)] | None = None
    sequences_max: int | None = Field(default=None, ge=1, le=1_000_000)
    budget: Annotated[RateBitsPerS, Field(ge=1_000_000)] | None = None
    """Limit of the rate of the link from each pool node to this pool node."""
    connections: int | None = Field(default=None, ge=1, le=16)
    """Data connections of such a link."""
    ready: bool = True
    """False gives it nothing new."""

    @model_validator(mode="after")
    def _has_a_place(self) -> MemberFile:
        needed = ("url", "pool") if self.kind == "engine" else ("address",)
        if missing := [key for key in needed if getattr(self, key) is None]:
            raise ValueError(f"kind {self.kind!r} needs {' and '.join(missing)}")
        if self.kv_events_replay and not self.kv_events:
            raise ValueError("kv_events_replay needs kv_events")
        return self

    def listed(self, name: str, *, with_links: bool) -> Listed:
        """The member of this file.

        Args:
            with_links: Read the settings of links to a pool node; they matter to pool nodes only.
        """
        if self.kind == "pool":
            links = link_settings(self.budget, self.connections) if with_links else ()
            member = Member(name, MemberKind.POOL, self.cluster, self.address or "", settings=links)
            return Listed(member, is_ready=self.ready)
        settings = {
            "kv_events": self.kv_events,
            "kv_events_replay": self.kv_events_replay,
            "sequences_max": str(self.sequences_max) if self.sequences_max else None,
        }
        member = Member(
            name,
            MemberKind.ENGINE,
            self.cluster,
            (self.url or "").rstrip("/"),
            self.pool or "",
            self.role.value,
            self.model,
            tuple((key, value) for key, value in settings.items() if value is not None),
        )
        return Listed(member, is_ready=self.ready)


class Folder:
    """The members in a directory. A file that cannot be read keeps its last member.

    Args:
        with_links: Read the settings of links to pool nodes.
        poll_s: Time between two looks, seconds.
    """

    name = "folder"

    def __init__(self, path: Path, *, with_links: bool = False, poll_s: float = POLL_S) -> None:
        self._path, self._with_links, self._poll_s = path, with_links, poll_s
        self._stamps: dict[str, Stamp] = {}
        self._listed: dict[str, Listed] = {}
        self._unread: dict[str, RefusedEntry] = {}
        self._is_new = True
        self.fault = self.waits = ""
        self.current_at_s = 0.0

    async def follow(self, on_list: OnList) -> None:
        """See `Source`."""
        while True:
            try:
                changed = await asyncio.to_thread(self._look)
                self.fault = ""
                self.current_at_s = asyncio.get_running_loop().time()
                if changed:
                    on_list([*self._listed.values()], [*self._unread.values()])
            except OSError as error:
                self.fault = f"{self._path} cannot be read: {error.strerror}"
            except ConfigError as error:
                self.fault = str(error)
            await asyncio.sleep(self._poll_s)

    def _look(self) -> bool:
        """Read changed files; return True if there were any.

        Raises:
            OSError: The directory cannot be read.
            ConfigError: It has too many files.
        """
        paths = {path.stem: path for path in self._path.iterdir() if path.suffix == ".toml"}
        if len(paths) > FILES_MAX:
            raise ConfigError(f"{self._path} has {len(paths)} member files, limit {FILES_MAX}")
        changed = self._is_new
        for name in self._stamps.keys() - paths.keys():
            changed = True
            del self._stamps[name]
            self._listed.pop(name, None)
            self._unread.pop(name, None)
        for name, path in sorted(paths.items()):
            try:
                found = path.stat()
                stamp = found.st_mtime_ns, found.st_size, found.st_ino
            except FileNotFoundError:
                continue
            except OSError:
                stamp = NO_STAMP  # Reading it says why.
            if self._stamps.get(name) == stamp:
                continue
            self._stamps[name], changed = stamp, True
            self._read(name, path)
        self._is_new = False
        return changed

    def _read(self, name: str, path: Path) -> None:
        try:
            if re.match(PART_NAME, name) is None:
                raise ConfigError(f"{path.name} is not named after {PATTERNS[PART_NAME]}")
            tables = read_toml(path, FILE_BYTES_MAX)
            table = validated(MemberFile, tables, path, words=PATTERNS)
        except ConfigError as error:
            self._unread[name] = RefusedEntry(
                name, RefusalCause.INVALID, str(error).replace("\n ", "")
            )
        else:
            self._listed[name] = table.listed(name, with_links=self._with_links)
            self._unread.pop(name, None)
