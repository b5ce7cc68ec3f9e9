"""First requests of engines that have just started: whether decode finds what was committed.

    python -m tests.live.first_requests [--starts N] [--kind KIND] [--transfer-timeout 5s]

Two engines of tensor-parallel size 2 on the CPU, two pool nodes and a gateway; both engines are
started anew N times, without a warm-up, and each pair gets one long prompt first and two more.
Prints a row for each prompt; exit code 1 if a transfer was committed and decode went on without
its blocks, or an answer is not the decode engine's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from prfaas.cli.deploy.topology import Topology, parts
from prfaas.cli.host.processes import ProcessPart
from tests.deployments import LAPTOP, ROOT, laid_out, placed, started
from tests.live.model_kinds import ALL_KINDS, make_kind

MLA = "latent, MLA (DeepSeek-V3)"
ENGINES = {"prfaas": "prfaas-engine", "pd": "pd-engine"}
PROMPT_TOKENS = (3_000, 6_100, 4_200)


@dataclass(frozen=True, slots=True)
class Row:
    """Outcome of one prompt.

    Attributes:
        path: Where it was prefilled, with the reason of a fallback.
        shipped: Blocks that were committed, bytes.
        num_tokens: Tokens of the prompt.
        wall_s: Until the whole answer was there, seconds.
        is_same: The answer is the decode engine's own.
    """

    path: str
    shipped: int
    num_tokens: int
    wall_s: float
    is_same: bool

    @property
    def is_good(self) -> bool:
        return self.path == "remote" and self.is_same


def settings(options: argparse.Namespace) -> str:
    args = ["--max-num-batched-tokens", "2048", "--tensor-parallel-size", "2"]
    lines = [f'[routing]\ntransfer_timeout = "{options.transfer_timeout}"']
    lines += [
        f'[clusters.{cluster}.engines.{engine}]\nargs = {json.dumps(args)}\ncpus = "0|1"'
        for cluster, engine in ENGINES.items()
    ]
    return "\n".join(lines)


async def ask(topology: Topology, http: aiohttp.ClientSession, number: str, num_tokens: int) -> Row:
    text = f"[{number}] " + (ROOT / "LICENSE").read_text()
    body: dict[str, object] = {
        "model": topology.deployment.model.name,
        "prompt": text[:num_tokens],
        "max_tokens": 16,
        "temperature": 0,
    }
    began = time.monotonic()
    async with http.post(f"{topology.gateway_url}/v1/completions", json=body) as reply:
        answer = await reply.json()
        request_id = reply.headers["X-Request-Id"]
    wall_s = time.monotonic() - began
    async with http.get(f"{topology.gateway_url}/control/requests/{request_id}") as reply:
        record = await reply.json()
    alone = body | {"cache_salt": f"alone {number}"}
    async with http.post(f"{topology.engines['pd-engine']}/v1/completions", json=alone) as reply:
        expected = await reply.json()
    async with http.post(f"{topology.engines['pd-engine']}/v1/completions", json=alone) as reply:
        cached = await reply.json()
    words = [each["choices"][0]["text"] for each in (answer, expected, cached)]
    path = record["path"] + (f" ({record['fallback']})" if record["fallback"] else "")
    return Row(path, record["kv_bytes"], num_tokens, wall_s, words[0] in words[1:])


async def try_start(
    topology: Topology, engines: list[ProcessPart], http: aiohttp.ClientSession, start: int
) -> bool:
    """Start both engines, send the prompts, stop the engines."""
    is_good = True
    async with started([engines]):
        await until_linked(http, topology.gateway_url)
        for number, num_tokens in enumerate(PROMPT_TOKENS):
            row = await ask(topology, http, f"{start}.{number}", num_tokens)
            print(
                f"| {start} | {number} | {row.num_tokens} | {row.path} | {row.shipped:,} | "
                f"{row.wall_s:.1f} s | {'same' if row.is_same else 'other'} |",
                flush=True,
            )
            is_good &= row.is_good
    return is_good


async def until_linked(http: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(120):
        while True:
            async with http.get(f"{url}/health?full=1") as reply:
                if reply.status == 200:
                    return
            await asyncio.sleep(0.1)


async def run(options: argparse.Namespace) -> bool:
    print("| start | prompt | tokens | path | shipped, B | time | answer |")
    print("|---|---|---|---|---|---|---|", flush=True)
    is_good = True
    with tempfile.TemporaryDirectory(prefix="first-") as scratch:
        local = options.keep or Path(scratch)
        local.mkdir(parents=True, exist_ok=True)
        make_kind(options.kind, local / "model")
        topology = await laid_out(*placed(LAPTOP, local, settings(options)))
        stages = parts(topology)
        for part in (part for stage in stages for part in stage):
            part.whole_url, part.warm_up = "", None
        engines = [p for stage in stages for p in stage if p.name in ENGINES.values()]
        rest = [[p for p in stage if p not in engines] for stage in stages]
        async with started(rest), aiohttp.ClientSession() as http:
            for start in range(options.starts):
                is_good &= await try_start(topology, engines, http, start)
    return is_good


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--kind", choices=list(ALL_KINDS), default=MLA)
    parser.add_argument("--transfer-timeout", default="5s")
    parser.add_argument("--keep", type=Path, help="new folder where logs stay")
    raise SystemExit(not asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
