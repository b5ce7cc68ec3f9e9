"""One table: hand-offs of every kind of KV cache by real vLLM engines, and whether answers hold.

    python -m tests.live.identity_by_kind [--seconds N] [KIND...]

For each kind of `model_kinds` two engines, two pool nodes and a gateway are started; long prompts
go through the gateway, and to the decode engine alone: with an empty cache, and again with the
prompt's prefix in its own. Prints a row for each kind. Exit code 1 if a prompt was not prefilled
remotely, a block of a cache group was not shipped or not loaded, the bytes are not the planner's,
or tokens or logprobs are not those of the engine alone with the prefix cached. No kind is begun
after N seconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from prfaas.cli.deploy.topology import Topology, parts
from prfaas.cli.preflight.compatibility import survey
from prfaas.core.kv.blocks import Layout
from prfaas.core.kv.shipping import shipped_range
from prfaas.planner.model.hf_config import geometry_from_config
from prfaas.planner.model.kv_geometry import shipped_kv_bytes
from prfaas.wire.identity import identity_in
from prfaas.wire.messages.survey import Surveyed
from tests.deployments import LAPTOP, ROOT, laid_out, placed, started
from tests.live.conftest import Live, until
from tests.live.model_kinds import ALL_KINDS, CHUNKED_KIND, STATE_KIND, make_kind
from tests.live.relay import Relay

PROMPT_TOKENS = (2_300, 3_700, 6_100)
ANSWER_TOKENS = 64
COLUMNS = (
    "kind",
    "groups",
    "remote",
    "blocks shipped",
    "loaded",
    "shipped, B",
    "planner, B",
    "as cached alone",
    "as computed alone",
    "logprobs apart from computed alone",
)


@dataclass(slots=True)
class Row:
    """Outcome for one kind.

    Attributes:
        kind: Name of the kind.
        num_groups: Cache groups.
        num_remote: Prompts that were prefilled remotely without a fallback.
        num_as_fresh: Answers whose tokens are those of an engine that computed the whole prompt.
        num_as_cached: Answers whose tokens and logprobs are those that it gives with the prefix in
            its own cache.
        apart: Largest difference of a logprob from the engine that computed the whole prompt, up
            to the first token that differs.
        num_blocks: Blocks of all groups that the prompts ship.
        num_loaded: Blocks that the decode engine loaded.
        num_bytes: KV cache that was shipped.
        planned_bytes: The planner's for the same prompts.
        fallbacks: Reasons of prompts that were not prefilled remotely.
    """

    kind: str
    num_groups: int = 0
    num_remote: int = 0
    num_as_fresh: int = 0
    num_as_cached: int = 0
    apart: float = 0.0
    num_blocks: int = 0
    num_loaded: int = 0
    num_bytes: int = 0
    planned_bytes: int = 0
    fallbacks: list[str] = field(default_factory=list)

    def line(self) -> str:
        of = f"of {len(PROMPT_TOKENS)}"
        return (
            f"| {self.kind} | {self.num_groups} | {self.num_remote} {of} | {self.num_blocks} | "
            f"{self.num_loaded} | {self.num_bytes:,} | {self.planned_bytes:,} | "
            f"{self.num_as_cached} {of} | {self.num_as_fresh} {of} | {self.apart:.2g} |"
        )

    @property
    def faults(self) -> list[str]:
        """Differences from the expected state."""
        every = len(PROMPT_TOKENS)
        # The decode engine needs the chunk that goes on alone, and is sent as much as a window.
        all_loaded = self.num_loaded == self.num_blocks or (
            self.kind == CHUNKED_KIND and 0 < self.num_loaded <= self.num_blocks
        )
        checks = {
            f"not all prompts were prefilled remotely: {self.fallbacks}": self.num_remote == every,
            "blocks were not loaded": all_loaded,
            "the bytes are not the planner's": self.num_bytes == self.planned_bytes,
            "answers differ from the engine alone with the prefix cached": self.num_as_cached
            == every,
        }
        return [words for words, holds in checks.items() if not holds]


def settings(kind: str) -> str:
    """Only the demo's model has a state whose format is told. A busy machine has its time."""
    args = ["--max-num-batched-tokens", "2048"]
    if kind == STATE_KIND:
        args += ["--mamba-ssm-cache-dtype", "float32"]
    return '[routing]\ntransfer_timeout = "60s"\n' + "\n".join(
        f"[clusters.{cluster}.engines.{engine}]\nargs = {json.dumps(args)}"
        for cluster, engine in (("prfaas", "prfaas-engine"), ("pd", "pd-engine"))
    )


async def ask(http: aiohttp.ClientSession, url: str, body: dict[str, object]) -> tuple[Any, str]:
    """The answer, and the request's id."""
    async with http.post(f"{url}/v1/completions", json=body) as reply:
        answer = await reply.json()
        if reply.status != 200:
            raise RuntimeError(f"{url} answers {reply.status}: {answer}")
        return answer, reply.headers.get("X-Request-Id", "")


def spoken(answer: Any) -> list[tuple[str, float]]:
    """Tokens of an answer, with their logprobs."""
    found = answer["choices"][0]["logprobs"]
    return list(zip(found["tokens"], found["token_logprobs"], strict=True))


def apart(one: list[tuple[str, float]], other: list[tuple[str, float]]) -> float:
    """Largest difference of logprobs, up to the first token that differs."""
    largest = 0.0
    for (token, a), (same, b) in zip(one, other, strict=False):
        largest = max(largest, abs(a - b))
        if token != same:
            break
    return largest


async def announced(topology: Topology) -> Layout:
    """The layout that both engines announced."""
    deployment = topology.deployment
    identity = identity_in(deployment.security.identities, deployment.gateway.name)
    found = await survey(topology.pools, identity.client_context(), 30.0)
    layouts = {
        name: spec.layout()
        for answer in found.values()
        if isinstance(answer, Surveyed)
        for name, spec in answer.layouts.items()
    }
    assert sorted(layouts) == ["pd-engine", "prfaas-engine"], found
    assert layouts["pd-engine"].layout_id == layouts["prfaas-engine"].layout_id
    return layouts["pd-engine"]


async def try_prompts(live: Live, row: Row) -> None:
    topology, http = live.topology, live.http
    layout = await announced(topology)
    row.num_groups = len(layout.groups)
    config = json.loads((Path(topology.deployment.model.path) / "config.json").read_text())
    geometry = geometry_from_config(config, state_dtype="float32")
    text = (ROOT / "LICENSE").read_text()
    pool, name = live.pool_admin("pd-pool"), "prfaas_pool_blocks_loaded_total"
    for number, length in enumerate(PROMPT_TOKENS):
        body: dict[str, object] = {
            "model": topology.deployment.model.name,
            "prompt": (f"[{number}] " + text)[:length],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "logprobs": 1,
        }
        before = await live.metric(pool, name)
        answer, request_id = await ask(http, topology.gateway_url, body)
        row.num_loaded += int(await live.metric(pool, name) - before)
        alone = body | {"cache_salt": f"alone {number}"}
        fresh, _ = await ask(http, topology.engines["pd-engine"], alone)
        cached, _ = await ask(http, topology.engines["pd-engine"], alone)
        record = await live.record(request_id)
        num_tokens = answer["usage"]["prompt_tokens"]
        final = layout.last_boundary(num_tokens)
        for group in layout.groups:
            first, last = shipped_range(group, 0, final)
            assert last > first, f"group {group.index} has no block"
            row.num_blocks += last - first
        is_remote = record["path"] == "remote" and record["fallback"] is None
        row.num_remote += is_remote
        if not is_remote:
            row.fallbacks.append(f"{record['path']}, {record['reason']}, {record['fallback']}")
        row.num_as_cached += spoken(answer) == spoken(cached)
        row.num_as_fresh += answer["choices"][0]["text"] == fresh["choices"][0]["text"]
        row.apart = max(row.apart, apart(spoken(answer), spoken(fresh)))
        row.num_bytes += record["kv_bytes"]
        row.planned_bytes += shipped_kv_bytes(geometry, num_tokens, layout.boundary_tokens)


async def run(kind: str, overlay: str | None = None) -> Row:
    """Hand prompts of one kind over, and compare.

    Args:
        kind: Of `ALL_KINDS`.
        overlay: Settings of the deployment, TOML; None takes those of `settings`.
    """
    row = Row(kind)
    with tempfile.TemporaryDirectory(prefix="kinds-") as local:
        make_kind(kind, Path(local) / "model")
        topology = await laid_out(*placed(LAPTOP, Path(local), overlay or settings(kind)))
        async with started(parts(topology)) as supervisor, aiohttp.ClientSession() as http:
            live = Live(topology, supervisor, Relay(topology.pools["pd-pool"]), http)
            await until(lambda: _is_ready(live))
            await try_prompts(live, row)
    return row


async def _is_ready(live: Live) -> bool:
    async with live.http.get(f"{live.url}/health?full=1") as reply:
        return reply.status == 200


async def main(kinds: list[str], limit_s: float) -> bool:
    """Run the kinds; False if one of them is not as it has to be."""
    is_good, began_s = True, time.monotonic()
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---" * len(COLUMNS) + "|", flush=True)
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
        print(row.line(), flush=True)
        for words in row.faults:
            print(f"{kind}: {words}", flush=True)
        is_good &= not row.faults
    return is_good


if __name__ == "__main__":
    words = sys.argv[1:]
    seconds = float(words.pop(1)) if words[:1] == ["--seconds"] else 3600.0
    chosen = [word for word in words if word != "--seconds"] or list(ALL_KINDS)
    sys.exit(not asyncio.run(main(chosen, seconds)))
