"""The actor of a part: it owns one process and reports on it; it decides nothing."""

from __future__ import annotations

import asyncio
import os
import re
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from prfaas.cli.host.processes import ProcessPart
from prfaas.cli.ray_site.parts import PartSpec, write_members

PROBE_TIMEOUT_S = 2.0
CANNOT_START = 127
WORK = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? ([0-9.eE+]+)$", re.M)


@dataclass(frozen=True, slots=True)
class Status:
    """A process.

    Attributes:
        exit_code: None while it runs.
        is_gone: True once all that it started has ended, too.
        error: The error that ended it; "" while it runs.
        last_words: Its last log lines; "" while it runs.
    """

    pid: int | None
    exit_code: int | None = None
    is_gone: bool = False
    error: str = ""
    last_words: str = ""


class PartActor:
    """A part on this host. Its process ends with the actor.

    Args:
        directory: Working directory, where relative paths of the deployment file start.
        folder: Directory of the member files.
        members: Text of the member files by name.
    """

    def __init__(
        self, spec: PartSpec, directory: Path, folder: Path, members: dict[str, str]
    ) -> None:
        os.chdir(directory)
        self._part: ProcessPart | None = None
        self._fault = ""
        try:
            write_members(folder, members)
            self._part = spec.part()
            self._part.start()
        except Exception as error:  # reported, since an actor that cannot be made says too little
            self._fault = f"cannot be started: {error}"

    def status(self) -> Status:
        """State of the process."""
        part = self._part
        if part is None or self._fault:
            return Status(None, CANNOT_START, True, self._fault, self._fault)
        if not part.has_ended():
            return Status(part.pid)
        return Status(
            part.pid, part.exit_code, part.is_gone(), part.last_error(), part.last_words()
        )

    def answers(self) -> bool:
        """Return True if the part's health page answers 200."""
        return self._part is not None and self._get(self._part.health_url) is not None

    def is_idle(self, url: str) -> bool:
        """Return True if an engine has no request."""
        page = self._get(f"{url}/metrics")
        return page is not None and not any(float(n) for n in WORK.findall(page))

    def write_members(self, folder: Path, members: dict[str, str]) -> None:
        """Replace the member files of this host."""
        write_members(folder, members)

    def terminate(self) -> None:
        """Ask the process to stop."""
        if self._part is not None:
            self._part.terminate()

    def clean_up(self) -> None:
        """Kill what is left of the process, and remove its files."""
        if self._part is not None:
            asyncio.run(self._part.clean_up())

    def _get(self, url: str) -> str | None:
        context = ssl.create_default_context()
        # A part of our own, asked by its address: its certificate is of another name.
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        try:
            with urllib.request.urlopen(  # noqa: S310 - a URL of the deployment
                url, timeout=PROBE_TIMEOUT_S, context=context
            ) as reply:
                page: bytes = reply.read(1 << 20)
                return page.decode(errors="replace") if reply.status == 200 else None
        except (OSError, ValueError):
            return None
