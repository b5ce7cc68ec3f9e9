"""Sites of unequal tensor-parallel sizes with real engines: prefill at one, decode at the other.

    python -m tests.live.unequal_sites [--sizes 2,1] [--tokens 2300,4100] [--dtype T] [KIND...]

Two vLLM engines on the CPU, two pool nodes and a gateway. Each prompt goes through the gateway, and
to the decode engine alone. Prints a row for each prompt; exit code 1 if one was not prefilled
remotely, was not loaded by the decode engine, or gave another token, or a logarithm of a
probability that differs by more than LOGPROB_MAX. Ranks add in another order, so the last bits of
KV cache differ between sizes; in float32 that is far below what changes a token. vLLM computes
gated delta nets on the CPU in bfloat16 alone (`--dtype bfloat16`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import aiohttp

from prfaas.cli.deploy.topology import parts
from prfaas.planner.model.hf_config import geometry_from_config
from prfaas.planner.model.kv_geometry import kv_bytes
from tests.deployments import LAPTOP, ROOT, laid_out, placed, started
from tests.live.conftest import Live
from tests.live.first_requests import until_linked
from tests.live.model_kinds import ALL_KINDS, KINDS, STATE_KIND, make_kind
from tests.live.relay import Relay

ANSWER_TOKENS, LOGPROB_MAX = 64, 1e-2
UNEQUAL = (next(iter(KINDS)),)


SETTING = "PRFAAS_BLOCKS"


def settings(kind: str, sizes: list[int], dtype: str) -> str:
    """Tensor-parallel sizes of the PrfaaS and of the PD engine."""
    lines = ['[routing]\ntransfer_timeout = "60s"']
    engines = (("prfaas", "prfaas-engine"), ("pd", "pd-engine"))
    for (cluster, engine), size in zip(engines, sizes, strict=True):
        args = ["--max-num-batched-tokens", "2048", "--tensor-parallel-size", str(size)]
        args += ["--dtype", dtype]
        if kind == STATE_KIND:
            args += ["--mamba-ssm-cache-dtype", "float32"]
        lines.append(f"[clusters.{cluster}.engines.{engine}]\nargs = {json.dumps(args)}")
        if size > 1:
            lines.append(f'env = {{ {SETTING} = "canonical" }}')
            lines.append(f'cpus = "{"|".join(str(rank % 2) for rank in range(size))}"')
    return "\n".join(lines)


async def ask(http: aiohttp.ClientSession, url: str, body: dict[str, object]) -> tuple[Any, str]:
    """The choice, and the request's id."""
    async with http.post(f"{url}/v1/completions", json=body) as reply:
        answer = await reply.json()
        if reply.status != 200:
            raise RuntimeError(f"{url} answers {reply.status}: {answer}")
        return answer["choices"][0], reply.headers.get("X-Request-Id", "")


async def loaded(live: Live) -> float:
    """Blocks that the decode engine has loaded from its pool node."""
    return await live.metric(live.pool_admin("pd-pool"), "prfaas_pool_blocks_loaded_total")


def _numbers(choice: Any) -> list[float]:
    return [float(number) for number in choice["logprobs"]["token_logprobs"]]


async def try_prompts(kind: str, lengths: list[int], dtype: str, live: Live) -> bool:
    """Send the prompts; True if every one is as it has to be."""
    topology, http = live.topology, live.http
    config = json.loads((Path(topology.deployment.model.path) / "config.json").read_text())
    geometry = geometry_from_config(config, kv_dtype=dtype, state_dtype="float32")
    text, is_good = (ROOT / "LICENSE").read_text(), True
    for number, length in enumerate(lengths):
        body: dict[str, object] = {
            "model": topology.deployment.model.name,
            "prompt": (f"[{number}] " + text)[:length],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "logprobs": 1,
        }
        before = await loaded(live)
        choice, request_id = await ask(http, topology.gateway_url, body)
        num_loaded = await loaded(live) - before
        alone, _ = await ask(
            http, topology.engines["pd-engine"], body | {"cache_salt": f"alone {number}"}
        )
        async with http.get(f"{topology.gateway_url}/control/requests/{request_id}") as reply:
            record = await reply.json()
        pairs = zip(choice["logprobs"]["tokens"], alone["logprobs"]["tokens"], strict=True)
        num_same = sum(one == other for one, other in pairs)
        apart = max(abs(a - b) for a, b in zip(_numbers(choice), _numbers(alone), strict=True))
        path = record["path"] + (f" ({record['fallback']})" if record["fallback"] else "")
        planned = kv_bytes(geometry, length)
        print(
            f"| {kind} | {length} | {path} | {record['kv_bytes']:,} | {planned:,} | "
            f"{num_loaded:.0f} | {num_same} of {ANSWER_TOKENS} | {apart:.1e} |",
            flush=True,
        )
        is_good &= (
            path == "remote"
            and num_loaded > 0
            and num_same == ANSWER_TOKENS
            and apart <= LOGPROB_MAX
        )
    return is_good


async def run(kind: str, options: argparse.Namespace) -> bool:
    sizes, lengths = _numbers_of(options.sizes), _numbers_of(options.tokens)
    with tempfile.TemporaryDirectory(prefix="unequal-") as scratch:
        local = options.keep or Path(scratch)
        local.mkdir(parents=True, exist_ok=True)
        make_kind(kind, local / "model")
        topology = await laid_out(*placed(LAPTOP, local, settings(kind, sizes, options.dtype)))
        stages = parts(topology)
        for part in (part for stage in stages for part in stage):
            part.whole_url, part.warm_up = "", None
        relay = Relay(topology.pools["pd-pool"])
        async with started(stages) as supervisor, aiohttp.ClientSession() as http:
            await until_linked(http, topology.gateway_url)
            return await try_prompts(
                kind, lengths, options.dtype, Live(topology, supervisor, relay, http)
            )


def _numbers_of(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


async def main(options: argparse.Namespace) -> bool:
    """Run the kinds; False if one of them is not as it has to be."""
    print(
        "| kind | tokens | path | shipped, B | planner, B | loaded | same tokens | logprobs apart |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    results = [await run(kind, options) for kind in options.kinds or list(UNEQUAL)]
    return all(results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", choices=[*ALL_KINDS, []], metavar="KIND")
    parser.add_argument("--sizes", default="2,1", help="of prefill and of decode")
    parser.add_argument("--tokens", default="2300,4100", help="of the prompts")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--keep", type=Path, help="new folder where logs stay")
    raise SystemExit(not asyncio.run(main(parser.parse_args())))
