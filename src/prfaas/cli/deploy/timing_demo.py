"""The demo without vLLM: two sites of timing engines in a folder of their own, and traffic.

The files are those of `prfaas init timing`. Nothing is read from or left in the working directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
from rich.live import Live
from rich.text import Text

from prfaas.cli.common.signals import EXIT_FAILURE, run_until_stopped, unless_stopped
from prfaas.cli.deploy.demo_client import JsonObject, body_of, serve_all, streamed_text
from prfaas.cli.deploy.demo_table import IF_LOCAL, DemoRow, document, table_of, timing_requests
from prfaas.cli.deploy.topology import Topology
from prfaas.cli.deploy.up_command import console, running
from prfaas.cli.parts.gateway_command import listen_on
from prfaas.cli.supervision.supervisor import Supervisor
from prfaas.config.clusters import ClusterRole
from prfaas.config.deployment import Deployment
from prfaas.config.load import load_deployment
from prfaas.errors import ConfigError, EngineError
from prfaas.limited_files import SHIPPED_ROOT
from prfaas.tasks import cancel_all
from prfaas.units import NS_PER_MS, format_size

INTRODUCTION = """\
Two sites on this machine: "pd" serves the clients, "prfaas" prefills long prompts for it.
Their engines are timing engines, which compute nothing: they wait as long as the GPUs of the
paper would (ten times faster), and answer letters without meaning. All else is real: gateway,
pool nodes, KV blocks, the encrypted link. Real engines: prfaas demo --engines vllm
"""
FILE, SETTINGS = Path("timing.toml"), Path("settings.toml")
FAST_START = "".join(
    f'[clusters.{cluster}]\ntiming.one_process = true\npools.{cluster}-pool.link_codec = "raw"\n'
    for cluster in ("prfaas", "pd")
)
"""Settings beside the file: fewer processes, and no kernels to compile at a first start."""
PORT = 8000
"""Of the gateway, if it is free: the one that `prfaas ctl` asks."""
FOLDER_CHARS_MAX = 50
"""Longest folder for temporary files: the paths of sockets in it are limited."""
NUM_REMOTE_MIN = 3
REQUESTS_PER_S = 1.0
FOLLOW_UP_RATIO = 0.25
"""Share of requests that ask about an earlier document."""
LOG_MEAN, LOG_SPREAD = 9.9, 1.0
"""Log-normal prompt lengths of the paper's case study, tokens."""
TOKENS_MIN, TOKENS_MAX = 200, 100_000
OPEN_MAX, DOCUMENTS_MAX = 16, 8
REQUEST_LIMIT = aiohttp.ClientTimeout(total=120)
FAILURES = (aiohttp.ClientError, EngineError, OSError, TimeoutError, ValueError)


def run_timing_demo(*, once: bool) -> int:
    """Run the demo until stopped; returns its exit code.

    Args:
        once: End after the table.

    Raises:
        ConfigError: There is no place for its files, or something on this machine has to change.
        EngineError: A part did not start, or a request of the table was not answered.
    """
    outcome: list[bool] = []

    async def run(stop: asyncio.Event) -> None:
        with gateway_port() as port:
            deployment = listen_on(load_deployment(FILE, SETTINGS), ("127.0.0.1", port))
            console.print(INTRODUCTION)
            async with running(deployment, FILE, stop, SETTINGS, restart=True) as (topology, parts):
                outcome.append(await unless_stopped(show_table(topology), stop))
                if not once:
                    point_out(topology, parts)
                    await SampleTraffic(topology).send(stop)

    with own_folder():
        run_until_stopped(run)
    return 0 if outcome == [True] else EXIT_FAILURE


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """Work in a new folder with the files of the demo, and remove it; ConfigError if there is no
    place for one."""
    place = Path(tempfile.gettempdir())
    if len(str(place)) > FOLDER_CHARS_MAX:
        place = Path("/tmp")  # noqa: S108 - a folder of its own is made in it
    try:
        folder = Path(tempfile.mkdtemp(prefix="prfaas-demo-", dir=place))
    except OSError as error:
        raise ConfigError(
            f"no folder for the demo's files in {place}: {error.strerror}; set TMPDIR to a folder "
            f"of yours with at most {FOLDER_CHARS_MAX} characters"
        ) from None
    try:
        os.chdir(folder)  # The paths in the file start here.
        FILE.write_bytes((SHIPPED_ROOT / "examples" / FILE).read_bytes())
        SETTINGS.write_text(FAST_START, encoding="utf-8")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def gateway_port() -> Iterator[int]:
    """`PORT` if it is free, kept from other demos that start meanwhile; else 0, for a free one."""
    with socket.socket(socket.AF_UNIX) as claim, socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = PORT
        try:
            claim.bind(f"\0prfaas-demo-{PORT}")
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            port = 0
        probe.close()
        yield port


async def show_table(topology: Topology) -> bool:
    """Send the first requests and show what became of them; True if some were offloaded."""
    rows: list[DemoRow] = []
    local_ms = local_prefill(topology.deployment)
    async with aiohttp.ClientSession(timeout=REQUEST_LIMIT) as session:
        with Live(console=console, refresh_per_second=4) as live:

            def show() -> None:
                for row in rows:
                    if row.record and row.if_local_ms is None:
                        row.if_local_ms = local_ms(row.record)
                if console.is_terminal:
                    live.update(table_of(rows, console.width, IF_LOCAL))

            await serve_all(session, topology, timing_requests(), rows, show)
            live.update(table_of(rows, console.width, IF_LOCAL))
    return summarise(rows)


def local_prefill(deployment: Deployment) -> Callable[[JsonObject], float]:
    """Time in which the PD cluster would prefill the new tokens of a record, milliseconds."""
    from prfaas.engines.timing.profile import load_profile

    timing = deployment.with_role(ClusterRole.PD)[0].timing
    if timing is None:
        raise ValueError("the demo has timing engines")
    costs = load_profile(
        timing.plan,
        None,
        deployment.model.name,
        block_tokens=timing.block_tokens,
        bytes_scale=timing.bytes_scale,
    ).costs
    scale = timing.time_scale / NS_PER_MS
    return lambda record: (
        scale * costs.local_prefill_ns(record["num_new_tokens"], record["pd_hit_tokens"] or 0)
    )


def summarise(rows: list[DemoRow]) -> bool:
    """Print what the table shows; True if requests were offloaded."""
    remote = [row for row in rows if row.record["path"] == "remote"]
    tokens = sum(row.record["num_new_tokens"] for row in rows)
    shipped_tokens = sum(row.record["num_new_tokens"] for row in remote)
    waited = sum(row.record["ttft_ms"] or 0 for row in remote)
    alone = sum(row.if_local_ms or 0 for row in remote)
    console.print(
        f"\n{len(remote)} of {len(rows)} requests, with {shipped_tokens / max(tokens, 1):.0%} of "
        f"all new tokens, were prefilled at the other site.\nTheir first tokens came after "
        f"{waited:,.0f} ms in all; prefilled locally, after {alone:,.0f} ms.\n"
        f"{format_size(sum(row.record['kv_bytes'] for row in rows))} of KV cache crossed the link, "
        f"a thousandth of the model's."
    )
    if any(row.record["second_ms"] is not None for row in remote):
        console.print(
            "A transfer may take longer than the first token (TTFT): the engine that prefilled\n"
            "gives that token, and the second one waits for the transfer."
        )
    return len(remote) >= NUM_REMOTE_MIN


def point_out(topology: Topology, parts: Supervisor) -> None:
    """Print where to look, and what to try."""
    url = topology.gateway_url
    pool = next(iter(topology.deployment.with_role(ClusterRole.PRFAAS)[0].pools))
    option = "" if url.endswith(f":{PORT}") else f" --url {url}"
    console.print(
        f"""
Open {url}/console
  Now        both sites, the link, the speed of each path
  Requests   each request, its path and why; click one for the parts of its time
  Offload above ... on the first page: set it to 5,000, and more prompts go to the other site
Break something
  kill {parts.part(pool).pid}   the other site's pool node: prompts are prefilled locally instead,
  {" " * len(str(parts.part(pool).pid))}        no request fails, and it is back in seconds
  prfaas ctl incidents{option}   what happened, whom it touched, what the system did
Ask for yourself
  {url}/v1   any OpenAI client, model {topology.deployment.model.name}
  prfaas top{option}   the state of both sites in a terminal

Sample traffic goes on until Ctrl-C.""",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


class SampleTraffic:
    """Requests at random times: chats, documents, and questions on earlier documents."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._random = random.Random()  # noqa: S311 - sample prompts
        self._text = document("core/request", TOKENS_MAX)
        self._documents: list[str] = []
        self._counts: Counter[str] = Counter()
        self._number = 0

    async def send(self, stop: asyncio.Event) -> None:
        """Send requests until stopped; then print how many there were."""
        open_requests: set[asyncio.Task[None]] = set()
        live = Live(console=console, get_renderable=self._line, refresh_per_second=2)
        async with aiohttp.ClientSession(timeout=REQUEST_LIMIT) as session:
            try:
                with live if console.is_terminal else contextlib.nullcontext():
                    while not stop.is_set():
                        if len(open_requests) < OPEN_MAX:
                            task = asyncio.create_task(self._ask(session, self._prompt()))
                            open_requests.add(task)
                            task.add_done_callback(open_requests.discard)
                        with contextlib.suppress(TimeoutError):
                            gap_s = self._random.expovariate(REQUESTS_PER_S)
                            await asyncio.wait_for(stop.wait(), gap_s)
            finally:
                await cancel_all(open_requests)
        if not console.is_terminal:
            console.print(self._line())

    def _line(self) -> Text:
        counts = self._counts
        return Text(
            f"{counts.total():,} requests answered: {counts['local']:,} local, "
            f"{counts['remote']:,} remote, {counts['failed']:,} failed"
        )

    def _prompt(self) -> str:
        if self._documents and self._random.random() < FOLLOW_UP_RATIO:
            return f"{self._random.choice(self._documents)}\n\nQuestion {self._random.random()}?"
        drawn = self._random.lognormvariate(LOG_MEAN, LOG_SPREAD)
        self._number += 1
        # A first line of its own: nothing of it is in a cache.
        text = f"Document {self._number}\n{self._text}"
        text = text[: int(min(max(drawn, TOKENS_MIN), TOKENS_MAX))]
        self._documents = [*self._documents, text][-DOCUMENTS_MAX:]
        return text

    async def _ask(self, session: aiohttp.ClientSession, prompt: str) -> None:
        body = body_of(self._topology, [{"role": "user", "content": prompt}]) | {"stream": True}
        url = f"{self._topology.gateway_url}/v1/chat/completions"
        try:
            async with session.post(url, json=body) as reply:
                reply.raise_for_status()
                await streamed_text(reply)
                path = reply.headers.get("X-Prfaas-Path", "local")
        except FAILURES:
            path = "failed"
        self._counts[path] += 1
