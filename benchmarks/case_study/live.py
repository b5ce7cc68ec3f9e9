"""One design, live, at two sites with the lab's WAN between them."""

import asyncio
import json
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.scaled_plan import scaled_plan
from benchmarks.two_sites import AWAY, GATEWAY, HOME, TwoSites, prepare
from prfaas.sim.system.request import Request
from prfaas.units import NS_PER_S
from tests.lab.wan import Side, Wan

from .designs import Design
from .outcome import Outcome

MODEL = "timing-1t"
BLOCK_TOKENS = 512
STREAM_INTERVAL = 64
POOL_MEMORY = "1GiB"
HOST_MEMORY = "64MiB"
ADMIN = "127.0.0.1:0"
BUDGET_SHARE = 0.93
"""Of the link's rate, as an operator would set it."""


@dataclass(frozen=True)
class Scale:
    """Factors by which the paper's deployment is made smaller.

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
    """Results of a run.

    Attributes:
        outcomes: Of every request.
        behind_s: How far an engine was behind its profile at most, the warm-up included.
        lag_s: How far a step was behind it on average.
        busy_ratio: Share of all cores that was in use, by anybody.
        cores: Cores that the run used, the link's emulator and the generator included.
        late_s: How late the generator sent a request at most.
        link_bytes: Bytes over the link to the PD site, headers included.
    """

    outcomes: list[Outcome]
    behind_s: float
    lag_s: float
    busy_ratio: float
    late_s: float
    cores: float
    link_bytes: int


async def run(
    design: Design,
    asked: list[Request],
    end_s: float,
    scale: Scale,
    bits_per_s: float,
    place: Path,
    routing: Sequence[str] | None = None,
    changing: Callable[[Wan], Awaitable[None]] | None = None,
    warm: Sequence[Sequence[int]] = (),
) -> Live:
    """Drive one design.

    Args:
        design: Which.
        asked: What comes when, in seconds of the profiles.
        end_s: When it is over, in the same.
        scale: How it is made smaller.
        bits_per_s: The paper's link.
        place: Folder for keys, sockets and logs.
        routing: Further lines of the gateway's `[routing]`; by default the plan with the bytes of
            these blocks, for predictions are compared with what the link is seen to carry.
        changing: Changes the link from the first request on; None for nobody.
        warm: Lengths of prompts before that, tokens, one wave after the other; all but the last
            wave are prefilled only. Connections to engines and between pools have windows then.
    """
    prepare(place)
    # Transfers take their time in seconds of the wall clock: the link is as much faster.
    rate = round(bits_per_s * scale.bytes / scale.time)
    if routing is None:
        routing = (f'plan = "{scaled_plan(bits_per_s, scale.bytes, place)}"',)
    began, used = time.monotonic(), _cpu_s()
    async with Wan(rtt_ms=scale.rtt_ms * scale.time, rate_bits_per_s=rate) as wan:
        site = _Site(TwoSites(wan, place, MODEL), design, scale, rate, routing)
        engines = await site.start()
        # Only blocks are made smaller: requests, which go the other way, have their size.
        await wan.change(rate_back_bits_per_s=round(bits_per_s / scale.time))
        before = (await wan.counters()).there
        spec = {
            "requests": [
                (r.arrived_at_ns / NS_PER_S * scale.time, r.num_prompt_tokens, r.num_output_tokens)
                for r in asked
            ],
            "end": end_s * scale.time,
            "engines": engines,
            "warm": list(warm),
        }
        report = await site.drive(spec, changing)
        after = (await wan.counters()).there
    outcomes = [_outcome(found, scale.time) for found in report["outcomes"]]
    late = max(found["late"] for found in report["outcomes"] if found.get("late") is not None)
    link_bytes = after.delivered_bytes - before.delivered_bytes
    cores = (_cpu_s() - used) / (time.monotonic() - began)
    behind, lag, busy = (report[name] for name in ("behind", "lag", "busy_ratio"))
    return Live(outcomes, behind, lag, busy, late, cores, link_bytes)


def _cpu_s() -> float:
    """CPU time of processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _outcome(found: dict[str, Any], time_scale: float) -> Outcome:
    first, done = found["first"], found.get("done")
    return Outcome(
        found["at"] / time_scale,
        None if first is None else first / time_scale,
        found["path"] == "remote",
        found["error"],
        None if done is None else done / time_scale,
        found.get("relayed", 0),
    )


class _Site:
    def __init__(
        self, sites: TwoSites, design: Design, scale: Scale, rate: int, routing: Sequence[str]
    ) -> None:
        self._sites, self._design, self._scale, self._rate = sites, design, scale, rate
        self._more = routing
        self._far = [f"prfaas-{i}" for i in range(design.num_prfaas)]
        self._prefill = [f"pd-p-{i}" for i in range(design.num_prefill)]
        self._decode = [f"pd-d-{i}" for i in range(design.num_decode)]

    async def start(self) -> list[str]:
        """Start everything.

        Returns:
            Base URLs of the engines.
        """
        sites, near = self._sites, self._prefill + self._decode
        await sites.start_pool(HOME, POOL_MEMORY, ADMIN)
        await self._engines(HOME, near)
        if self._far:
            budget = f"pd-pool={round(self._rate * BUDGET_SHARE)}bps"
            await sites.start_pool(AWAY, POOL_MEMORY, ADMIN, "--link-budget", budget)
            await self._engines(AWAY, self._far)
        decodes = "decode" if self._prefill else "both"
        roles = dict.fromkeys(self._prefill, "prefill") | dict.fromkeys(self._decode, decodes)
        far = {AWAY: dict.fromkeys(self._far, "")} if self._far else {}
        await sites.start_gateway(self._routing(), {**far, HOME: roles})
        return [sites.engine_url(HOME, i) for i in range(len(near))] + [
            sites.engine_url(AWAY, i) for i in range(len(self._far))
        ]

    async def drive(
        self, spec: dict[str, Any], changing: Callable[[Wan], Awaitable[None]] | None
    ) -> Any:
        sites = self._sites
        arguments = [f"http://{GATEWAY}", MODEL, str(sites.tokenizer)]
        command = [sys.executable, "-m", "benchmarks.case_study.load", *arguments]
        client = await sites.wan.run(
            HOME, command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(json.dumps(spec).encode())
        client.stdin.close()
        begins = await client.stdout.readline()
        change = asyncio.ensure_future(changing(sites.wan)) if begins and changing else None
        output = await client.stdout.read()
        if change is not None:
            change.cancel()
        if await client.wait():
            raise SystemExit(f"the load generator failed; logs are in {sites.place}")
        return json.loads(output)

    async def _engines(self, side: Side, names: list[str]) -> None:
        scale = self._scale
        arguments = ["--time-scale", str(scale.time), "--bytes-scale", str(scale.bytes)]
        arguments += ["--block-tokens", str(BLOCK_TOKENS), "--host-memory", HOST_MEMORY]
        # Tokens of a relay count as they come.
        interval = 1 if self._design.relays else STREAM_INTERVAL
        arguments += ["--stream-interval", str(interval)]
        await self._sites.start_engines(side, names, *arguments)

    def _routing(self) -> list[str]:
        return [
            f"offload_threshold = {self._design.threshold}",
            f'policy = "{self._design.policy.value}"',
            'prefill_timeout = "300s"',
            'transfer_timeout = "60s"',
            f'early_first_token = "{"auto" if self._design.is_early else "off"}"',
            f'relay_decode = "{"always" if self._design.relays else "off"}"',
            *self._more,
        ]
