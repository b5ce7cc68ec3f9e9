"""Cost of a gateway: ours beside other routers and a straight connection. Needs two cores.

    python -m benchmarks.gateway --routers VENV --dynamo VENV [--quick] [--runs 1K]

Timing engines with near-zero times answer everybody; sessions of other HTTP routers are answered by
engines that do not tokenise (`held.py`), as their tokenising would take an hour. The router that is
measured runs on one core, engines and load generator on the other. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGTERM
from typing import Any

from prfaas.gateway.http.connections import connections_max
from tests.ports import free_port

from .peers import Peer, peers
from .prompts import ROOT, Prompts, body, make_checkpoint
from .systems import MODEL, OTHER_CORE, System, bare_engine, deployment

HELP_ROUTERS = """environment with the other routers: `python -m venv VENV`, then
`VENV/bin/pip install sglang-router==0.3.2 vllm-router==0.1.17`"""
HELP_DYNAMO = """environment with NVIDIA Dynamo: `python -m venv VENV`, then
`VENV/bin/pip install --no-deps ai-dynamo==1.6.1`, `VENV/bin/pip install ai-dynamo-runtime==1.6.1
aiohttp msgspec numpy prometheus-client pyyaml pyzmq tqdm transformers zstandard`"""
SHORT, OUTPUT = 100, 16
OPEN_STREAMS = "open streams"
NUM_HELD = 10_000
"""Open streams; fewer where a process may not have the descriptors."""
SPARE = 100
"""Connections for health and metrics."""
NUM_SESSIONS, NUM_SESSIONS_OF_OTHERS, SESSIONS_AT_ONCE = 5000, 500, 100


@dataclass
class Run:
    """Requests of one kind.

    Attributes:
        num_tokens: Of each prompt.
        count: Requests.
        concurrency: Requests at a time.
        shared: Part of the prompt that all have in common, sent once before.
        turns: Requests of a session, each of which adds 3.5 % of `num_tokens`, their mean. Sessions
            take turns. 0 for no sessions.
    """

    num_tokens: int
    count: int
    concurrency: int = 1
    shared: float = 0.0
    turns: int = 0


RUNS = {
    "short": Run(SHORT, 2000, 32),
    "1K": Run(1000, 300),
    "32K": Run(32_000, 25),
    "32K shared": Run(32_000, 20, shared=0.9),
    "100K shared": Run(100_000, 10, shared=0.9),
    "agent turn": Run(142_000, 860, 20, turns=43),
}
EVERY = [*RUNS, OPEN_STREAMS]


@dataclass
class Measured:
    """Figures of a system in all runs.

    Attributes:
        system: Its name.
        own_engines: Whether engines of its own answered: times are not to be compared.
    """

    system: str
    own_engines: bool = False
    ttft_ms: dict[str, list[float]] = field(default_factory=dict)
    cpu_ms: dict[str, float] = field(default_factory=dict)
    per_s: dict[str, float] = field(default_factory=dict)
    num_errors: int = 0
    held_mib: float | None = None
    sessions_mib: float | None = None


class Bench:
    """Makes prompts and has them sent."""

    def __init__(self, local: Path, scale: float, runs: list[str]) -> None:
        self._local, self._scale = local, scale
        self._runs = {name: run for name, run in RUNS.items() if name in runs}
        self._prompts = Prompts(local / "model")
        self.found: dict[str, Measured] = {}

    def _bodies(self, run: Run, count: int) -> tuple[bytes, list[bytes]]:
        if run.turns:
            return b"", self._sessions(run, count)
        start = self._prompts.conversation(int(run.num_tokens * run.shared)) if run.shared else []
        start = start and [*start, {"role": "assistant", "content": "Yes."}]
        rest = int(run.num_tokens * (1 - run.shared))
        made = [body(MODEL, start + self._prompts.conversation(rest), OUTPUT) for _ in range(count)]
        return body(MODEL, [*start, {"role": "user", "content": "First?"}], OUTPUT), made

    def _sessions(self, run: Run, count: int) -> list[bytes]:
        """Bodies of sessions; the load takes the last one first."""
        each = run.num_tokens * 7 // 200
        start = run.num_tokens - each * (run.turns - 1) // 2
        talks: list[list[dict[str, str]]] = [[] for _ in range(max(1, count // run.turns))]
        made: list[bytes] = []
        for turn in range(run.turns):
            for talk in talks:
                text = self._prompts.text(each if turn else start)
                talk += [{"role": "user", "content": text}]
                made.append(body(MODEL, talk, OUTPUT))
                talk += [{"role": "assistant", "content": "Yes."}]
        return made[::-1]

    async def measure(self, system: System, *, sessions: bool | None = None) -> None:
        """All runs on one system, or those of sessions alone, or all others."""
        measured = self.found.setdefault(system.name, Measured(system.name, system.own_engines))
        warm = Run(SHORT, 100, 8)
        await self._send(system, self._bodies(warm, warm.count)[1], warm.concurrency)
        for name, run in self._runs.items():
            if sessions not in (None, bool(run.turns)):
                continue
            count = max(run.turns or run.concurrency, round(run.count * self._scale))
            first, bodies = self._bodies(run, count)
            if run.shared:
                await self._send(system, [first], 1)
            count = len(bodies)
            result = await self._send(
                system, bodies, min(run.concurrency, count // (run.turns or 1))
            )
            measured.num_errors += result["num_errors"]
            measured.ttft_ms[name] = sorted(1e3 * seconds for seconds in result["ttft_s"])
            measured.cpu_ms[name] = 1e3 * result["cpu_s"] / count
            measured.per_s[name] = count / result["wall_s"]
            print(
                f"{system.name}, {name}: TTFT {quantile(measured.ttft_ms[name], 0.5):.2f} ms, "
                f"p99 {quantile(measured.ttft_ms[name], 0.99):.2f} ms, "
                f"CPU {measured.cpu_ms[name]:.2f} ms a request, {measured.per_s[name]:.0f}/s, "
                f"{result['num_errors']} errors",
                file=sys.stderr,
                flush=True,
            )

    async def _send(self, system: System, bodies: list[bytes], concurrency: int) -> dict[str, Any]:
        async with asyncio.timeout(300):
            process = await self._start(system, bodies, concurrency, hold=False)
            out, _ = await process.communicate()
        return dict(json.loads(out))

    async def held_mib(self, system: System) -> None:
        """Memory of 10,000 open streams, or as many as it may have descriptors for."""
        processes = max(1, len(system.pids) - 1)
        count = round(min(NUM_HELD, processes * most_open()) * self._scale)
        bodies = self._bodies(Run(SHORT, count), count)[1]
        before = system.memory_bytes
        process = await self._start(system, bodies, count, hold=True)
        assert process.stdout is not None
        async with asyncio.timeout(120):
            result = json.loads(await process.stdout.readline())
        if result["num_errors"]:
            raise RuntimeError(f"{system.name}: {result['num_errors']} of {count} were not held")
        each = (system.memory_bytes - before) / count
        mib = each * NUM_HELD / 2**20
        said = f"{system.name}, {processes} processes: {count} streams, {mib:.0f} MiB of 10,000"
        print(said, file=sys.stderr, flush=True)
        await process.communicate(b"\n")
        if processes == 1:
            self.found.setdefault(system.name, Measured(system.name)).held_mib = mib

    async def sessions_mib(self, system: System) -> None:
        """Memory of 5,000 sessions, each of which has had one turn; of others from fewer."""
        count = NUM_SESSIONS if system.name == "prfaas" else NUM_SESSIONS_OF_OTHERS
        count = max(SESSIONS_AT_ONCE, round(count * self._scale))
        run = RUNS["agent turn"]
        talk = body(MODEL, self._prompts.conversation(run.num_tokens), OUTPUT)
        start, said, rest = talk.partition(b'"content": "')
        before = system.memory_bytes
        for first in range(0, count, SESSIONS_AT_ONCE):
            numbers = range(first, first + SESSIONS_AT_ONCE)
            talks = [b"%b%bSession %d. %b" % (start, said, number, rest) for number in numbers]
            result = await self._send(system, talks, run.concurrency)
            self.found[system.name].num_errors += result["num_errors"]
        each = (system.memory_bytes - before) / count
        print(f"{system.name}: {each / 2**10:.1f} KiB a session", file=sys.stderr, flush=True)
        # What is bounded does not grow with the number.
        self.found[system.name].sessions_mib = each * NUM_SESSIONS / 2**20

    async def _start(
        self, system: System, bodies: list[bytes], concurrency: int, *, hold: bool
    ) -> asyncio.subprocess.Process:
        path = self._local / "bodies"
        path.write_bytes(b"\n".join(bodies))
        job = {"host": "127.0.0.1", "port": system.port, "pids": system.pids}
        job |= {"concurrency": concurrency, "bodies": str(path), "hold": hold}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *("taskset", "-c", str(OTHER_CORE), sys.executable, "-m", "benchmarks.gateway.load"),
            stdin=pipe,
            stdout=pipe,
            cwd=ROOT,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(job).encode() + b"\n")
        await process.stdin.drain()
        return process


def table(all_measured: list[Measured]) -> str:
    """Markdown."""
    straight = all_measured[0]
    lines = [
        "| | " + " | ".join(m.system for m in all_measured) + " |",
        "|---" * (len(all_measured) + 1) + "|",
    ]

    def row(name: str, *cells: str) -> None:
        lines.append(f"| {name} | " + " | ".join(cells) + " |")

    for run in (name for name in ("1K", "32K", "32K shared") if name in straight.ttft_ms):
        for q, of in (("p50", 0.5), ("p99", 0.99)):
            here = quantile(straight.ttft_ms[run], of)
            cells = [
                "" if m.own_engines else f"{quantile(m.ttft_ms[run], of) - here:+.2f}"
                for m in all_measured[1:]
            ]
            row(f"added TTFT {q}, {run}, ms (straight: the TTFT)", f"{here:.2f}", *cells)
    if "short" in straight.per_s:
        per_s = ("" if m.own_engines else f"{m.per_s['short']:.0f}" for m in all_measured)
        row("short streams/s, 32 at a time", *per_s)
        row("short streams per CPU-second", "", *(per_cpu(m) for m in all_measured[1:]))
    for kind in all_measured[-1].cpu_ms:
        row(
            f"CPU per request, {kind}, ms", "", *(f"{m.cpu_ms[kind]:.2f}" for m in all_measured[1:])
        )
    if any(m.held_mib is not None for m in all_measured):
        held = ("" if m.held_mib is None else f"{m.held_mib:.0f}" for m in all_measured)
        row("memory of 10,000 open streams, MiB", *held)
    if any(m.sessions_mib is not None for m in all_measured):
        kept = ("" if m.sessions_mib is None else f"{m.sessions_mib:.0f}" for m in all_measured)
        row("memory of 5,000 sessions of 142K tokens, MiB", *kept)
    row("errors", *(str(m.num_errors) for m in all_measured))
    return "\n".join(lines)


def per_cpu(measured: Measured) -> str:
    spent = measured.cpu_ms["short"]
    return f"{1e3 / spent:.0f}" if spent else "-"


def quantile(ordered: list[float], of: float) -> float:
    return ordered[min(int(of * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


def most_open() -> int:
    """Streams that a process has descriptors for, as `connections_max` counts."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    return connections_max(NUM_HELD) - SPARE


async def bench(local: Path, others: list[Peer], scale: float, runs: list[str]) -> list[Measured]:
    stopped = asyncio.current_task()
    assert stopped is not None
    asyncio.get_running_loop().add_signal_handler(SIGTERM, stopped.cancel)
    make_checkpoint(local / "model")
    runner = Bench(local, scale, runs)
    if runs == [OPEN_STREAMS]:
        await _held(runner, local, others)
        return list(runner.found.values())
    async with deployment(local) as ours:
        port = int(next(iter(ours.engines)).rpartition(":")[2])
        await runner.measure(System("straight", port), sessions=False)
        await runner.measure(ours.system)
        for other in others:
            async with other.serving(local, ours.engines) as system:
                await runner.measure(system, sessions=False)
    if "agent turn" in runs:
        await _sessions(runner, local, others, with_memory=len(runs) > len(RUNS))
    if OPEN_STREAMS in runs:
        await _held(runner, local, others)
    return list(runner.found.values())


async def _sessions(runner: Bench, local: Path, others: list[Peer], *, with_memory: bool) -> None:
    """Sessions of other routers, and memory of the sessions of all."""
    if with_memory:
        async with bare_engine("answer") as url, deployment(local, url) as ours:
            await runner.sessions_mib(ours.system)
    told = "answer", "tokenize"
    async with bare_engine(*told) as one, bare_engine(*told) as two:
        engines = {url: f"tcp://127.0.0.1:{free_port()}" for url in (one, two)}
        for other in others:
            async with other.serving(local, engines) as system:
                await runner.measure(system, sessions=True)
                if with_memory:
                    await runner.sessions_mib(system)


async def _held(runner: Bench, local: Path, others: list[Peer]) -> None:
    """Memory of the open streams of all; ours with two workers too."""
    for workers in (1, 2):
        async with bare_engine("hold") as url, deployment(local, url, workers) as ours:
            await runner.held_mib(ours.system)
    async with bare_engine("hold", "tokenize") as url:
        for other in others:
            async with other.holding(local, url) as system:
                await runner.held_mib(system)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--routers", type=Path, metavar="VENV", help=HELP_ROUTERS)
    parser.add_argument("--dynamo", type=Path, metavar="VENV", help=HELP_DYNAMO)
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    parser.add_argument("--runs", nargs="+", choices=EVERY, default=EVERY, help="only these")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as local:
        scale = 0.1 if options.quick else 1.0
        others = peers(options.routers, options.dynamo)
        found = asyncio.run(bench(Path(local), others, scale, options.runs))
    print(table(found))


if __name__ == "__main__":
    main()
