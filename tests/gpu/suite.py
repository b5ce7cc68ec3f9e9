"""Figures of accelerators: identity of answers, copy rates, TTFT, and profiles of engines.

    python -m tests.gpu.suite --out docs/results/gpu.md               # on a machine with a GPU
    python -m tests.gpu.suite --device cpu --lengths 2048 --out FILE  # the same code without one

Two vLLM engines share the first device, 0.4 of its memory each, with CUDA graphs. With two devices
the PD engine runs once more with tensor-parallel size 2.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import aiohttp

from prfaas.cli.deploy.topology import parts
from tests.deployments import LAPTOP, ROOT, laid_out, placed, put_between, started
from tests.lab.faults import FaultProxy
from tests.live.conftest import Live, until
from tests.live.identity_by_kind import COLUMNS, run
from tests.live.model_kinds import STATE_KIND, make_kind
from tests.live.relay import Relay

DENSE_KIND = "grouped queries (Llama)"
KINDS = (STATE_KIND, DENSE_KIND)
LENGTHS = (8_192, 16_384, 32_768, 65_536, 131_072)
CLUSTERS = (("prfaas", "prfaas-engine"), ("pd", "pd-engine"))
COPY_BYTES, COPY_BLOCKS = 1 << 30, (1 << 16, 1 << 20, 1 << 23)
LINK_BITS_PER_S, ONE_WAY_S = 10**9, 0.01
"""Of the emulated link: a relay that holds bytes back, and loses none."""
MEMORY_SHARE = "0.4"
TOKEN_ID_MAX = 250
"""The vocabulary of the checkpoints has fewer than 500 tokens."""
FEW, MORE, WHOLE = 4, 8, 24
"""Layers of two engines, and of the model that `prfaas profile --layers` extrapolates to."""


@dataclass(frozen=True)
class Machine:
    """The device that engines run on.

    Attributes:
        device: "cuda" or "cpu".
        num_devices: Accelerators; 0 on a CPU.
        name: For the provenance.
    """

    device: str
    num_devices: int
    name: str

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"


CPU = Machine("cpu", 0, platform.processor() or platform.machine())


def gpus() -> Machine | None:
    """The accelerators of this machine; None without."""
    import torch

    if not torch.cuda.is_available():
        return None
    return Machine("cuda", torch.cuda.device_count(), torch.cuda.get_device_name(0))


@dataclass
class Figures:
    """Figures of a run of the suite; each list has lines of a table."""

    machine: Machine
    identity: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)
    ttft: list[str] = field(default_factory=list)
    profiles: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    stacks: list[str] = field(default_factory=list)


def engine_args(
    machine: Machine, kind: str, tokens_max: int, ranks: int = 1, layers: int = 0
) -> list[str]:
    """vLLM's arguments of an engine; without `--enforce-eager` CUDA graphs are on."""
    args = ["--max-num-batched-tokens", "8192" if machine.is_gpu else "2048"]
    if kind == STATE_KIND:
        args += ["--mamba-ssm-cache-dtype", "float32"]
    if machine.is_gpu:
        args += ["--gpu-memory-utilization", MEMORY_SHARE, "--dtype", "bfloat16"]
        args += ["--max-model-len", str(tokens_max)]
    if layers:
        overrides = json.dumps({"num_hidden_layers": layers})
        args += ["--load-format", "dummy", "--hf-overrides", overrides]
    if ranks > 1:
        args += ["--tensor-parallel-size", str(ranks)]
    return args


def settings(
    machine: Machine,
    kind: str,
    tokens_max: int = 16_384,
    *,
    pd_ranks: int = 1,
    memory: str = "",
    layers: tuple[int, int] = (0, 0),
) -> str:
    """Settings that take precedence over the laptop's deployment file, as TOML."""
    lines = ['[routing]\ntransfer_timeout = "60s"']
    for (cluster, engine), num_layers in zip(CLUSTERS, layers, strict=True):
        ranks = pd_ranks if cluster == "pd" else 1
        lines += [
            f"[clusters.{cluster}.engines.{engine}]",
            f"args = {json.dumps(engine_args(machine, kind, tokens_max, ranks, num_layers))}",
        ]
        if memory:
            lines += [f'host_memory = "{memory}"']
            lines += [f"[clusters.{cluster}.pools.{cluster}-pool]", f'memory = "{memory}"']
    return "\n".join(lines)


async def identity(machine: Machine, kind: str, figures: Figures, pd_ranks: int = 1) -> None:
    """Hand prompts of a kind over; tokens and logprobs have to be those of one engine."""
    row = await run(kind, settings(machine, kind, pd_ranks=pd_ranks))
    figures.identity.append(row.line())
    figures.faults += [f"{kind}, TP {pd_ranks}: {words}" for words in row.faults]


def copy_rate(machine: Machine, num_bytes: int, block_bytes: int, *, to_host: bool) -> float:
    """Bytes per second of copies between device and pinned host memory, block by block."""
    import torch

    size = num_bytes // block_bytes * block_bytes
    there = torch.zeros(size, dtype=torch.uint8, device=machine.device)
    here = torch.zeros(size, dtype=torch.uint8, pin_memory=machine.is_gpu)
    source, target = (there, here) if to_host else (here, there)
    began = 0.0
    for is_timed in (False, True):
        if machine.is_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter() if is_timed else began
        for at in range(0, size, block_bytes):
            end = at + block_bytes
            target[at:end].copy_(source[at:end], non_blocking=True)
    if machine.is_gpu:
        torch.cuda.synchronize()
    return size / (time.perf_counter() - began)


def copies(machine: Machine, figures: Figures, num_bytes: int = COPY_BYTES) -> None:
    """Rates of both directions by the size of a block."""
    for block_bytes in COPY_BLOCKS:
        out, into = (
            copy_rate(machine, num_bytes, block_bytes, to_host=each) / 1e9 for each in (True, False)
        )
        figures.copies.append(f"| {block_bytes:,} | {out:.3g} | {into:.3g} |")


def lengthen(model: Path, tokens_max: int) -> None:
    """Let a checkpoint with random weights take longer prompts."""
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = max(tokens_max, config["max_position_embeddings"])
    (model / "config.json").write_text(json.dumps(config))


async def first_token_s(http: aiohttp.ClientSession, url: str, body: dict[str, object]) -> float:
    """Seconds to the answer of one token."""
    began = time.perf_counter()
    async with http.post(f"{url}/v1/completions", json=body | {"max_tokens": 1}) as reply:
        answer = await reply.json()
        if reply.status != 200:
            raise RuntimeError(f"{url} answers {reply.status}: {answer}")
    return time.perf_counter() - began


async def ttft(machine: Machine, kind: str, lengths: tuple[int, ...], figures: Figures) -> None:
    """TTFT of prompts that nobody holds: at the PD engine alone, and through the gateway.

    Remotely over the loopback interface, and over the emulated link.
    """
    tokens_max, draws = max(lengths) + 256, random.Random(1)
    with tempfile.TemporaryDirectory(prefix="gpu-") as local:
        make_kind(kind, Path(local) / "model")
        lengthen(Path(local) / "model", tokens_max)
        memory = "8GiB" if machine.is_gpu else "256MiB"
        overlay = settings(machine, kind, tokens_max, memory=memory)
        seconds = dict[str, list[float]]()
        paths = list[str]()
        for is_far in (False, True):
            topology = await laid_out(*placed(LAPTOP, Path(local), overlay))
            stages, link = parts(topology), FaultProxy(topology.pools["pd-pool"])
            if is_far:
                link.link_bits_per_s, link.delay_s = LINK_BITS_PER_S, ONE_WAY_S
                await link.open()
                put_between(stages, "prfaas-pool", "pd-pool", link.port)
            async with started(stages) as supervisor, aiohttp.ClientSession() as http:
                live = Live(topology, supervisor, Relay(topology.pools["pd-pool"]), http)
                await until(partial(_is_ready, live))
                for length in (min(lengths), *lengths):  # The first is a warm-up.
                    body = partial(_body, live.model, length, draws)
                    if not is_far:
                        url = topology.engines["pd-engine"]
                        _add(seconds, "alone", await first_token_s(http, url, body()))
                    where = "link" if is_far else "loopback"
                    _add(seconds, where, await first_token_s(http, live.url, body()))
                    paths.append(await _path(live))
                if not is_far:
                    known = topology.engines
                    figures.profiles += await profile(
                        known, live.model, machine, curve(lengths), local
                    )
            await link.close()
    ways = zip(paths[1 : len(lengths) + 1], paths[len(lengths) + 2 :], strict=True)
    rows = zip(lengths, *(each[1:] for each in seconds.values()), ways, strict=True)
    for length, alone, near, far, (path, far_path) in rows:
        how = path if path == far_path else f"{path}, {far_path}"
        line = f"| {kind} | {length:,} | {alone:.3f} | {near:.3f} | {far:.3f} | {how} |"
        figures.ttft.append(line)


def curve(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Lengths of a profile, which has at least two."""
    return lengths if len(lengths) > 1 else (lengths[0] // 2, *lengths)


def _add(seconds: dict[str, list[float]], where: str, value: float) -> None:
    seconds.setdefault(where, []).append(value)


async def _is_ready(live: Live) -> bool:
    async with live.http.get(f"{live.url}/health?full=1") as reply:
        return reply.status == 200


async def _path(live: Live) -> str:
    """The path of the last request."""
    async with live.http.get(f"{live.url}/control/requests") as reply:
        [record, *_] = (await reply.json())["requests"]
    path: str = record["path"] if record["fallback"] is None else "fell back"
    return path


def _body(model: str, length: int, draws: random.Random) -> dict[str, object]:
    prompt = [draws.randrange(10, TOKEN_ID_MAX) for _ in range(length)]
    return {"model": model, "prompt": prompt, "temperature": 0}


async def profile(
    engines: dict[str, str], model: str, machine: Machine, lengths: tuple[int, ...], local: str
) -> list[str]:
    """`prfaas profile` of both engines."""
    found = []
    for name, url in engines.items():
        out = Path(local) / f"{name}.toml"
        await run_profile([url], model, machine, lengths, out)
        found.append(f"`{name}`:\n\n```toml\n{out.read_text().strip()}\n```")
    return found


async def run_profile(
    words: list[str], model: str, machine: Machine, lengths: tuple[int, ...], out: Path
) -> None:
    """Run `prfaas profile`, with `words` first."""
    words = ["profile", *words, "--model", model, "--hardware", machine.name, "--out", str(out)]
    words += ["--lengths", ",".join(map(str, lengths)), "--max-token-id", str(TOKEN_ID_MAX)]
    command = [sys.executable, "-m", "prfaas", *words]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
    if await process.wait():
        raise RuntimeError(f"{' '.join(words)} failed")


async def layer_stack(machine: Machine, lengths: tuple[int, ...], figures: Figures) -> None:
    """Extrapolate from engines with part of the layers, and measure one with all of them."""
    found = []
    for layers in ((FEW, MORE), (WHOLE, FEW)):
        with tempfile.TemporaryDirectory(prefix="gpu-") as local:
            make_kind(DENSE_KIND, Path(local) / "model")
            lengthen(Path(local) / "model", max(lengths) + 256)
            overlay = settings(machine, DENSE_KIND, max(lengths) + 256, layers=layers)
            topology = await laid_out(*placed(LAPTOP, Path(local), overlay))
            first, second = (topology.engines[name] for _, name in CLUSTERS)
            words = [first]
            if layers == (FEW, MORE):
                words += [second, "--layers", f"{FEW},{MORE},{WHOLE}"]
            stages = parts(topology)
            async with started(stages):
                out, model = Path(local) / "profile.toml", topology.deployment.model.name
                await run_profile(words, model, machine, lengths, out)
                found.append(tomllib.loads(out.read_text())["prefill"]["seconds"])
    for length, extrapolated, measured_s in zip(lengths, *found, strict=True):
        ratio = extrapolated / measured_s
        figures.stacks.append(
            f"| {length:,} | {extrapolated:.4f} | {measured_s:.4f} | {ratio:.2f} |"
        )


def page(figures: Figures, command: str) -> str:
    """The results, with their provenance."""
    import torch
    import vllm

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],  # noqa: S607
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    machine = figures.machine
    where = f"{machine.num_devices} x {machine.name}" if machine.is_gpu else f"CPU, {machine.name}"
    now = datetime.now(UTC)
    sections = [
        "# Engines on accelerators" if machine.is_gpu else "# The GPU suite on a CPU",
        f"    {command}",
        f"{where}; vLLM {vllm.__version__}, torch {torch.__version__}, Python "
        f"{platform.python_version()}; commit {commit}; {now:%Y-%m-%d}. Both engines share the "
        "first device. Where no other link is named, it is the loopback interface.",
        "## Answers",
        _table(COLUMNS, figures.identity),
        "## Copies between device and host memory, GB/s",
        _table(("block, B", "to the host", "to the device"), figures.copies),
        "## Time to first token, s",
        "Through the gateway over the loopback interface, and over an emulated link of "
        f"{LINK_BITS_PER_S / 1e9:g} Gbit/s and {2000 * ONE_WAY_S:g} ms round trip, without loss.",
        _table(
            ("model", "prompt", "PD engine alone", "loopback", "emulated link", "path"),
            figures.ttft,
        ),
        "## Profiles",
        *figures.profiles,
        f"## {WHOLE} layers, from engines with {FEW} and {MORE}",
        "Of the dense model, by `prfaas profile --layers`.",
        _table(("prompt", "extrapolated, s", "measured, s", "ratio"), figures.stacks),
        "## Faults",
        "\n".join(f"- {words}" for words in figures.faults) or "None.",
    ]
    return "\n\n".join(sections) + "\n"


def _table(columns: tuple[str, ...], lines: list[str]) -> str:
    return "\n".join([f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *lines])


async def measured(machine: Machine, lengths: tuple[int, ...]) -> Figures:
    """Run everything that this machine can show."""
    figures = Figures(machine)
    for kind in KINDS:
        await identity(machine, kind, figures)
    if machine.num_devices > 1:
        await identity(machine, DENSE_KIND, figures, pd_ranks=2)
    copies(machine, figures)
    for kind in KINDS:
        await ttft(machine, kind, lengths, figures)
    await layer_stack(machine, curve(lengths), figures)
    return figures


def main() -> int:
    """Run the suite and write its page; 1 if something is not as it has to be."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--out", type=Path, required=True)
    words = parser.parse_args()
    machine = gpus() if words.device == "cuda" else CPU
    if machine is None:
        print("no NVIDIA GPU here; --device cpu runs the same code without one")
        return 2
    lengths = tuple(int(each) for each in words.lengths.split(","))
    figures = asyncio.run(measured(machine, lengths))
    words.out.write_text(page(figures, f"python -m tests.gpu.suite {' '.join(sys.argv[1:])}"))
    return 1 if figures.faults else 0


if __name__ == "__main__":
    sys.exit(main())
