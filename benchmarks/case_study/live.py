"""One design, live: PrfaaS site and PD site in network namespaces, with the lab's WAN between."""

import asyncio
import json
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prfaas.engines.checkpoint import make_checkpoint
from prfaas.lab.wan import Side, Wan
from prfaas.sim.request import Request
from prfaas.units import NS_PER_S
from prfaas.wire.identity import make_authority, make_identity

from .designs import PLAN, Design
from .outcome import Outcome

MODEL = "timing-1t"
BLOCK_TOKENS = 512
STREAM_INTERVAL = 64
POOL_MEMORY = "1GiB"
HOST_MEMORY = "64MiB"
FIRST_PORT, POOL_PORT, GATEWAY = 8100, 7100, "127.0.0.1:8000"
BUDGET_SHARE = 0.93
"""Of the link's rate, as an operator would set it."""


@dataclass(frozen=True)
class Scale:
    """How the paper's deployment is made smaller.

    Attributes:
        bytes: Size of KV blocks, and rate of the link, as a share of the paper's.
        time: Seconds of the wall clock for a second of the profiles.
        rtt_ms: Round trip of the link, which the paper does not say.
    """

    bytes: float
    time: float
    rtt_ms: float


@dataclass(frozen=True)
class Live:
    """What a run showed.

    Attributes:
        outcomes: Of every request.
        behind_s: How far an engine was behind its profile at most.
        busy_ratio: Share of all cores that was in use, by anybody.
        cores: Cores that the run used, the link's emulator and the generator included.
        late_s: How late the generator sent a request at most.
        link_bytes: Bytes over the link to the PD site, headers included.
    """

    outcomes: list[Outcome]
    behind_s: float
    busy_ratio: float
    late_s: float
    cores: float
    link_bytes: int


async def run(
    design: Design, asked: list[Request], end_s: float, scale: Scale, bits_per_s: float, place: Path
) -> Live:
    """Drive one design.

    Args:
        design: Which.
        asked: What comes when, in seconds of the profiles.
        end_s: When it is over, in the same.
        scale: How it is made smaller.
        bits_per_s: The paper's link.
        place: Folder for keys, sockets and logs.
    """
    make_checkpoint(place / "tokenizer", weights=False)
    make_authority(place)
    for name in ("gateway", "prfaas-pool", "pd-pool"):
        make_identity(place, name)
    # Transfers take their time in seconds of the wall clock: the link is as much faster.
    rate = round(bits_per_s * scale.bytes / scale.time)
    began, used = time.monotonic(), _cpu_s()
    async with Wan(rtt_ms=scale.rtt_ms * scale.time, rate_bits_per_s=rate) as wan:
        site = _Site(wan, design, scale, rate, place)
        engines = await site.start()
        before = (await wan.counters()).there
        spec = {
            "requests": [
                (r.arrived_at_ns / NS_PER_S * scale.time, r.num_prompt_tokens, r.num_output_tokens)
                for r in asked
            ],
            "end": end_s * scale.time,
            "engines": engines,
        }
        report = await site.drive(spec)
        after = (await wan.counters()).there
    outcomes = [_outcome(found, scale.time) for found in report["outcomes"]]
    late = max(found["late"] for found in report["outcomes"] if found.get("late") is not None)
    link_bytes = after.delivered_bytes - before.delivered_bytes
    cores = (_cpu_s() - used) / (time.monotonic() - began)
    return Live(outcomes, report["behind"], report["busy_ratio"], late, cores, link_bytes)


def _cpu_s() -> float:
    """CPU time of processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _outcome(found: dict[str, Any], time_scale: float) -> Outcome:
    first = found["first"]
    return Outcome(
        found["at"] / time_scale,
        None if first is None else first / time_scale,
        found["path"] == "remote",
        found["error"],
    )


class _Site:
    def __init__(self, wan: Wan, design: Design, scale: Scale, rate: int, place: Path) -> None:
        self._wan, self._design, self._scale, self._rate = wan, design, scale, rate
        self._place = place
        self._far = [f"prfaas-{i}" for i in range(design.num_prfaas)]
        self._prefill = [f"pd-p-{i}" for i in range(design.num_prefill)]
        self._decode = [f"pd-d-{i}" for i in range(design.num_decode)]

    async def start(self) -> list[str]:
        """Start everything.

        Returns:
            Base URLs of the engines.
        """
        near = self._prefill + self._decode
        await self._pool("b", "pd-pool")
        await self._engines("b", "pd-pool", near)
        if self._far:
            await self._pool("a", "prfaas-pool")
            await self._engines("a", "prfaas-pool", self._far)
        file = self._place / "gateway.toml"
        file.write_text(self._deployment())
        await self._start("b", "gateway", ["gateway", str(file)])
        return [self._url("b", i) for i in range(len(near))] + [
            self._url("a", i) for i in range(len(self._far))
        ]

    async def drive(self, spec: dict[str, Any]) -> Any:
        arguments = [f"http://{GATEWAY}", MODEL, str(self._place / "tokenizer")]
        command = [sys.executable, "-m", "benchmarks.case_study.load", *arguments]
        client = await self._wan.run(
            "b", command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await client.communicate(json.dumps(spec).encode())
        if client.returncode:
            raise SystemExit(f"the load generator failed; logs are in {self._place}")
        return json.loads(output)

    def _url(self, side: Side, index: int) -> str:
        return f"http://{self._wan.address(side)}:{FIRST_PORT + index}"

    async def _start(self, side: Side, name: str, arguments: list[str]) -> None:
        with (self._place / f"{name}.log").open("wb") as log:
            await self._wan.run(
                side,
                [sys.executable, "-m", "prfaas", *arguments],
                stdout=log,
                stderr=log,
                env=dict(os.environ),
            )

    async def _pool(self, side: Side, name: str) -> None:
        arguments = ["pool", "--name", name, "--memory", POOL_MEMORY]
        arguments += ["--listen", f"{self._wan.address(side)}:{POOL_PORT}"]
        arguments += ["--admin", "127.0.0.1:0", "--socket", str(self._socket(name))]
        arguments += ["--identities", str(self._place), "--gateway", "gateway"]
        if side == "a":
            arguments += ["--peer", f"pd-pool={self._wan.address('b')}:{POOL_PORT}"]
            arguments += ["--link-budget", f"pd-pool={round(self._rate * BUDGET_SHARE)}bps"]
        else:
            arguments += ["--source", "prfaas-pool"]
        await self._start(side, name, arguments)

    async def _engines(self, side: Side, pool: str, names: list[str]) -> None:
        arguments = ["engine", "timing", "--plan", str(PLAN), "--pool", str(self._socket(pool))]
        arguments += ["--cluster", "prfaas"] if side == "a" else []
        arguments += ["--model", MODEL, "--model-path", str(self._place / "tokenizer")]
        arguments += ["--time-scale", str(self._scale.time)]
        arguments += ["--bytes-scale", str(self._scale.bytes)]
        arguments += ["--block-tokens", str(BLOCK_TOKENS), "--host-memory", HOST_MEMORY]
        arguments += ["--stream-interval", str(STREAM_INTERVAL)]
        for index, name in enumerate(names):
            address = f"{self._wan.address(side)}:{FIRST_PORT + index}"
            arguments += ["--engine", f"{name}={address}"]
        await self._start(side, f"engines-{side}", arguments)

    def _socket(self, pool: str) -> Path:
        return self._place / f"{pool}.sock"

    def _deployment(self) -> str:
        design = self._design
        lines = [f'state = "{self._place}/state"', "[model]", f'name = "{MODEL}"']
        lines += [f'path = "{self._place}/tokenizer"', "[gateway]", f'listen = "{GATEWAY}"']
        lines += ["[routing]", f"offload_threshold = {design.threshold}"]
        lines += [f'policy = "{design.policy.value}"', 'prefill_timeout = "300s"']
        lines += ['transfer_timeout = "60s"', f'plan = "{PLAN}"']
        lines += ["[security]", f'identities = "{self._place}"']
        if self._far:
            lines += self._cluster("a", "prfaas", "prfaas-pool", dict.fromkeys(self._far, ""))
        roles = dict.fromkeys(self._prefill, "prefill") | dict.fromkeys(
            self._decode, "decode" if self._prefill else "both"
        )
        return "\n".join(lines + self._cluster("b", "pd", "pd-pool", roles)) + "\n"

    def _cluster(self, side: Side, role: str, pool: str, engines: dict[str, str]) -> list[str]:
        lines = [f"[clusters.{role}]", f'role = "{role}"', f"[clusters.{role}.pools.{pool}]"]
        lines += [f'address = "{self._wan.address(side)}:{POOL_PORT}"']
        for index, (name, duty) in enumerate(engines.items()):
            lines += [f"[clusters.{role}.engines.{name}]", f'pool = "{pool}"']
            lines += [f'url = "{self._url(side, index)}"'] + ([f'role = "{duty}"'] if duty else [])
        return lines
