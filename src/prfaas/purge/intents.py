"""Purges that were begun, a file for each until everything is done; and parts where they failed.

    FOLDER/GATEWAY.DIGEST.json    the target; DIGEST is of the target

A file is there before the first pool node is asked, synchronised to the disk, and removed when all
parts are done. A gateway repeats what it finds at its start. Every step of a purge may be repeated.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from prfaas.core.kv.shipping import MANIFEST_BYTES_MAX
from prfaas.logs import log_event
from prfaas.purge.targets import Target

_log = logging.getLogger(__name__)

FOLDER = "purges"
INTENTS_MAX = 1000
FILE_BYTES_MAX = 2 * MANIFEST_BYTES_MAX


class Intents:
    """The purges that one gateway has begun.

    Args:
        state: Folder of the deployment's state; files are in a folder in it.
        gateway: Name of the gateway, part of the names of its files.
    """

    def __init__(self, state: Path, gateway: str) -> None:
        self._folder, self._gateway = state / FOLDER, gateway

    def begin(self, target: Target) -> None:
        """Record a purge. Once this returns, it survives a crash.

        Raises:
            OSError: It cannot be recorded.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._path(target)
        draft = path.with_suffix(".draft")
        with draft.open("wb") as file:
            file.write(msgspec.json.encode(target))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        self._synchronise()

    def end(self, target: Target) -> None:
        """Remove a purge that is done.

        Raises:
            OSError: Its file cannot be removed; the purge will be repeated.
        """
        self._path(target).unlink(missing_ok=True)
        self._synchronise()

    def pending(self) -> list[Target]:
        """Purges that are not done, at most INTENTS_MAX."""
        found = []
        for path in sorted(self._folder.glob(f"{self._gateway}.*.json"))[:INTENTS_MAX]:
            try:
                with path.open("rb") as file:
                    found.append(msgspec.json.decode(file.read(FILE_BYTES_MAX), type=Target))
            except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
                log_event(
                    _log, logging.ERROR, "purge_unreadable", file=str(path), why=str(error)[:200]
                )
        return found

    def _path(self, target: Target) -> Path:
        digest = hashlib.blake2b(msgspec.json.encode(target), digest_size=16).hexdigest()
        return self._folder / f"{self._gateway}.{digest}.json"

    def _synchronise(self) -> None:
        file = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)


class Unfinished:
    """Pool nodes and engines at which a purge failed, since the process started."""

    def __init__(self) -> None:
        self._left: dict[Target, frozenset[str]] = {}

    def note(self, target: Target, asked: Collection[str] | None, failed: Iterable[str]) -> bool:
        """Record an attempt; return True if nothing is left to do.

        Args:
            asked: Names of the parts that were asked; None if all were.
            failed: Those that are not done, and may be later.
        """
        earlier = frozenset[str]() if asked is None else self._left.get(target, frozenset())
        left = (earlier - frozenset(asked or ())) | frozenset(failed)
        self._left[target] = left
        if not left:
            del self._left[target]
        return not left

    def due(
        self,
        target: Target,
        reachable: Collection[str],
        pools: Collection[str],
        clusters: Iterable[tuple[Collection[str], Collection[str]]],
    ) -> frozenset[str]:
        """Names of the parts to be asked now; empty if a repeat would change nothing.

        After a failure at a pool node, engines of its cluster may have loaded blocks from it again;
        after one at an engine, it may have stored blocks in pools of its cluster. Before the first
        attempt of this process all parts are due, once all pools are connected.

        Args:
            reachable: Parts that can be asked.
            clusters: Pool nodes and engines of each cluster.
        """
        left = self._left.get(target)
        if left is None:
            is_up = all(name in reachable for name in pools)
            return frozenset(pools).union(*(each for _, each in clusters)) if is_up else frozenset()
        found = roots = left.intersection(reachable)
        for nodes, engines in clusters:
            if not roots.isdisjoint(nodes):
                found = found.union(engines)
            if not roots.isdisjoint(engines):
                found = found.union(nodes)
        return found
