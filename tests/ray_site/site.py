"""A site of timing engines under `prfaas ray`, and clients that check every answer."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prfaas.cli.supervision.client import parts_of
from tests.ports import free_port
from tests.ray_nodes.cluster import RayNodes
from tests.sim.systems import EXAMPLES

FILE = """
state = "{local}/s"
[model]
name = "timing"
path = "{local}/model"
generate = true
[gateway]
listen = "127.0.0.1:{port}"
drain_timeout = "5s"
[routing]
offload_threshold = 19400
policy = "local"
transfer_timeout = "5s"
[security]
identities = "{local}/identities"
generate = true
[clusters.pd]
role = "pd"
[clusters.pd.timing]
plan = "{plan}"
time_scale = 0.02
bytes_scale = 0.001
block_tokens = 256
[clusters.pd.pools.pool-a]
memory = "64MiB"
[clusters.pd.pools.pool-b]
memory = "64MiB"
[clusters.pd.engines.a1]
pool = "pool-a"
host_memory = "32MiB"
[clusters.pd.engines.b1]
pool = "pool-b"
host_memory = "32MiB"
[clusters.pd.engines.a2]
pool = "pool-a"
host_memory = "32MiB"
[clusters.pd.engines.b2]
pool = "pool-b"
host_memory = "32MiB"
"""
NEEDS = ("engine=CPU:0.5", "pool=CPU:0.5", "gateway=host0:1")


@dataclass
class Site:
    """A running site.

    Attributes:
        file: Its deployment file.
        url: Of its gateway.
        env: Environment of its commands.
        log: Output of `prfaas ray up`.
    """

    file: Path
    url: str
    env: dict[str, str]
    log: Path

    def command(self, *words: str) -> str:
        """Standard output of a command."""
        made = subprocess.run(
            [sys.executable, "-m", "prfaas", *words],
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        return made.stdout if made.stdout else made.stderr

    def parts(self) -> dict[str, dict[str, Any]]:
        """Parts by name."""
        # A command a look would take the CPU time of an engine's start.
        return {part["name"]: part for part in parts_of(self.file.parent / "s")}

    def nodes(self) -> dict[str, str]:
        """First node of each part by its name."""
        found: dict[str, str] = {}
        for names, node in re.findall(r"^(.+): node (\w+) at ", self.log.read_text(), re.M):
            found |= dict.fromkeys(names.split(", "), node)
        return found


def deployment_file(local: Path, port: int) -> Path:
    """Write a site's deployment file."""
    file = local / "site.toml"
    plan = EXAMPLES.parent / "plan" / "paper-case-study.toml"
    file.write_text(FILE.format(local=local, port=port, plan=plan))
    return file


@contextlib.contextmanager
def running_site(local: Path, nodes: RayNodes, *words: str) -> Iterator[Site]:
    """`prfaas ray up`, ready."""
    port = free_port()
    file = deployment_file(local, port)
    log = local / "up.log"
    command = [sys.executable, "-m", "prfaas", "ray", "up", str(file), "--address", nodes.address]
    command += [word for need in NEEDS for word in ("--need", need)]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *words], env=nodes.env, stdout=output, stderr=subprocess.STDOUT
        )
    site = Site(file, f"http://127.0.0.1:{port}", nodes.env, log)
    try:
        until(lambda: process.poll() is not None or "ready at" in log.read_text(), 150, log)
        assert process.poll() is None, log.read_text()
        yield site
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()


def until(condition: Callable[[], bool], limit_s: float, log: Path | None = None) -> float:
    """Seconds until a condition holds."""
    started = time.monotonic()
    while not condition():
        waited = time.monotonic() - started
        assert waited < limit_s, log.read_text() if log else "it did not happen in time"
        time.sleep(0.1)
    return time.monotonic() - started


@dataclass
class Clients:
    """Clients of a gateway, which repeat a few prompts."""

    url: str
    num_answers: int = 0
    errors: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    _known: dict[int, str] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def load(self) -> Iterator[None]:
        """Requests while the context is open."""
        threads = [threading.Thread(target=self._ask_all, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _ask_all(self, first: int) -> None:
        number = first
        while not self._stop.wait(0.1):
            number = (number + 2) % 10
            try:
                text = self.answer(number)
            except (OSError, ValueError) as error:
                detail = error.read()[:300] if isinstance(error, urllib.error.HTTPError) else ""
                self.errors.append(f"{error} {detail!r}")
                continue
            self.num_answers += 1
            if self._known.setdefault(number, text) != text:
                self.wrong.append(f"prompt {number}: {text!r}, not {self._known[number]!r}")

    def answer(self, number: int) -> str:
        """The answer to one prompt."""
        body = {"model": "timing", "prompt": f"{number} " * 900, "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            text: str = json.load(reply)["choices"][0]["text"]
            return text
