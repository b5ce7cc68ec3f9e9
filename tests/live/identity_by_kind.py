"""One table: hand-offs of every kind of KV cache by real vLLM engines, and whether answers hold.

    python -m tests.live.identity_by_kind [--seconds N] [KIND...]

For each kind of `model_kinds` two engines, two pool nodes and a gateway are started; long prompts
go through the gateway, and to the decode engine alone: with an empty cache, and again with the
prompt's prefix in its own. Prints a row for each kind; exit code 1 if an answer is none of the two,
or a prompt was not prefilled remotely. No kind is begun after N seconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from prfaas.cli.deploy.topology import Topology, parts
from prfaas.planner.model.hf_config import geometry_from_config
from prfaas.planner.model.kv_geometry import kv_bytes
from tests.deployments import LAPTOP, ROOT, laid_out, placed, started
from tests.live.model_kinds import ALL_KINDS, STATE_KIND, make_kind

PROMPT_TOKENS = (2_300, 3_700, 6_100)
ANSWER_TOKENS = 48


@dataclass(slots=True)
class Row:
    """Outcome for one kind.

    Attributes:
        num_remote: Prompts that were prefilled remotely without a fallback.
        num_as_fresh: Answers equal to those of an engine that computed the whole prompt.
        num_as_cached: Answers equal to those it gives with the prefix in its own cache.
        num_other: Answers equal to neither.
        num_bytes: KV cache that was shipped.
        planned_bytes: The planner's for the same prompts, whole.
    """

    num_remote: int = 0
    num_as_fresh: int = 0
    num_as_cached: int = 0
    num_other: int = 0
    num_bytes: int = 0
    planned_bytes: int = 0

    def line(self, kind: str) -> str:
        of = f"of {len(PROMPT_TOKENS)}"
        return (
            f"| {kind} | {self.num_remote} {of} | {self.num_as_cached} {of} | "
            f"{self.num_as_fresh} {of} | {self.num_bytes:,} | {self.planned_bytes:,} |"
        )

    @property
    def is_good(self) -> bool:
        return self.num_remote == len(PROMPT_TOKENS) and not self.num_other


def settings(kind: str) -> str:
    """Only the demo's model has a state whose format is told."""
    args = ["--max-num-batched-tokens", "2048"]
    if kind == STATE_KIND:
        args += ["--mamba-ssm-cache-dtype", "float32"]
    return "\n".join(
        f"[clusters.{cluster}.engines.{engine}]\nargs = {json.dumps(args)}"
        for cluster, engine in (("prfaas", "prfaas-engine"), ("pd", "pd-engine"))
    )


async def ask(http: aiohttp.ClientSession, url: str, body: dict[str, object]) -> tuple[str, str]:
    """The answer's text, and the request's id."""
    async with http.post(f"{url}/v1/completions", json=body) as reply:
        answer = await reply.json()
        if reply.status != 200:
            raise RuntimeError(f"{url} answers {reply.status}: {answer}")
        return str(answer["choices"][0]["text"]), reply.headers.get("X-Request-Id", "")


async def try_prompts(topology: Topology, http: aiohttp.ClientSession, row: Row) -> None:
    model = Path(topology.deployment.model.path)
    config = json.loads((model / "config.json").read_text())
    geometry = geometry_from_config(config, state_dtype="float32")
    text = (ROOT / "LICENSE").read_text()
    for number, length in enumerate(PROMPT_TOKENS):
        body: dict[str, object] = {
            "model": topology.deployment.model.name,
            "prompt": (f"[{number}] " + text)[:length],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
        }
        answer, request_id = await ask(http, topology.gateway_url, body)
        alone = body | {"cache_salt": f"alone {number}"}
        fresh, _ = await ask(http, topology.engines["pd-engine"], alone)
        cached, _ = await ask(http, topology.engines["pd-engine"], alone)
        url = f"{topology.gateway_url}/control/requests/{request_id}"
        async with http.get(url) as reply:
            record = await reply.json()
        row.num_remote += record["path"] == "remote" and record["fallback"] is None
        row.num_as_fresh += answer == fresh
        row.num_as_cached += answer == cached
        row.num_other += answer not in (fresh, cached)
        row.num_bytes += record["kv_bytes"]
        row.planned_bytes += kv_bytes(geometry, length)


async def run(kind: str) -> Row:
    row = Row()
    with tempfile.TemporaryDirectory(prefix="kinds-") as home:
        make_kind(kind, Path(home) / "model")
        topology = await laid_out(*placed(LAPTOP, Path(home), settings(kind)))
        async with started(parts(topology)), aiohttp.ClientSession() as http:
            await try_prompts(topology, http, row)
    return row


async def main(kinds: list[str], limit_s: float) -> bool:
    """Run the kinds; False if one of them is not as it has to be."""
    is_good, began_s = True, time.monotonic()
    print("| kind | remote | as cached alone | as computed alone | shipped, B | planner, B |")
    print("|---|---|---|---|---|---|", flush=True)
    for kind in kinds:
        if time.monotonic() - began_s > limit_s:
            print(f"not run: {kind}", flush=True)
            continue
        try:
            row = await run(kind)
        except Exception as problem:
            print(f"| {kind} | FAILED: {type(problem).__name__}: {problem} |"[:300], flush=True)
            is_good = False
            continue
        print(row.line(kind), flush=True)
        is_good &= row.is_good
    return is_good


if __name__ == "__main__":
    words = sys.argv[1:]
    seconds = float(words.pop(1)) if words[:1] == ["--seconds"] else 3600.0
    chosen = [word for word in words if word != "--seconds"] or list(ALL_KINDS)
    sys.exit(not asyncio.run(main(chosen, seconds)))
