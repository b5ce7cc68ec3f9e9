"""The mismatch experiment: one fact altered at one site, real vLLM engines, nothing wrong served.

    python -m tests.live.mismatch [--seconds N] [CASE...]

Two vLLM engines on the CPU, two pool nodes and a gateway serve the laptop example; the engine of
the PrfaaS cluster is started anew for each case, with one argument, file or environment variable
changed. Each case sends long prompts and compares every answer with that of the decode engine
alone, and reads what health, `prfaas ctl status`, console and metric say. Prints a row of a table
for each case; exit code 1 if a token is wrong, or a mismatch is not named somewhere. No case is
begun after N seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from prfaas.cli.deploy.topology import Topology, parts
from prfaas.cli.host.processes import ProcessPart
from prfaas.cli.operate.ctl_views import joined, status_lines
from prfaas.engines.launch import Command
from prfaas.errors import PrfaasError
from tests.deployments import LAPTOP, laid_out, placed, started

REMOTE, NUM_PROMPTS, SEEN_S = "prfaas-engine", 3, 60.0
YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    }
}


@dataclass(frozen=True, slots=True)
class Case:
    """A change at the PrfaaS site, and the fact that has to be named.

    Attributes:
        fact: Name of a fact that has to be among the first; "" if nothing may differ.
        args: Arguments that come last, and so win.
        change: Changes a copy of the checkpoint, which the engine then serves.
        env: Environment of the engine.
    """

    fact: str
    args: tuple[str, ...] = ()
    change: Callable[[Path], None] | None = None
    env: dict[str, str] = field(default_factory=dict)


def _flip(name: str) -> Callable[[Path], None]:
    """Change one bit of the last byte but one of a file, which leaves it valid."""

    def change(model: Path) -> None:
        with (model / name).open("r+b") as file:
            file.seek(-2, os.SEEK_END)
            [byte] = file.read(1)
            file.seek(-2, os.SEEK_END)
            file.write(bytes([byte ^ 1]))

    return change


def _append(name: str, text: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        with (model / name).open("a") as file:
            file.write(text)

    return change


CASES = {
    "nothing": Case(""),
    "directory of another name": Case("", change=lambda _: None),
    "limits of batches": Case("", args=("--max-num-seqs", "3")),
    "recurrent state in float16": Case(
        "group.0.dtypes", args=("--mamba-ssm-cache-dtype", "float16")
    ),
    "convolution state in float32": Case("group.0.dtypes", args=("--mamba-cache-dtype", "float32")),
    "rope scaling (YaRN) by --hf-overrides": Case(
        "config.rope_parameters.rope_type", args=("--hf-overrides", json.dumps(YARN))
    ),
    "another epsilon by --hf-overrides": Case(
        "config.rms_norm_eps", args=("--hf-overrides", '{"rms_norm_eps": 1e-5}')
    ),
    "weights in float16": Case("model_config.dtype", args=("--dtype", "float16")),
    "KV cache in fp8": Case("cache_config.cache_dtype", args=("--kv-cache-dtype", "fp8")),
    "block size": Case("group.0.block_size", args=("--block-size", "768")),
    "tensor-parallel size": Case(
        "blocks",
        args=("--tensor-parallel-size", "2"),
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    ),
    "one bit of the weights": Case("model.weights", change=_flip("model.safetensors")),
    "chat template": Case("model.chat_template", change=_append("chat_template.jinja", "\n")),
    "tokenizer": Case("model.tokenizer", change=_append("tokenizer.json", "\n")),
    "weights by chance (--load-format dummy)": Case(
        "load_config.load_format", args=("--load-format", "dummy")
    ),
    "speculative decoding": Case(
        "group.0.parts",
        args=("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'),
    ),
}


@dataclass(slots=True)
class Row:
    """Observations of a case."""

    paths: list[str] = field(default_factory=list)
    num_wrong: int = 0
    kv_bytes: float = 0
    words: str = ""
    missing: list[str] = field(default_factory=list)
    """Places that do not name the fact."""
    refused: str = ""
    """Why the engine did not start."""

    def is_good(self, case: Case) -> bool:
        if self.refused or not case.fact:
            return not self.num_wrong and (bool(self.refused) or "remote" in self.paths)
        return not self.num_wrong and not self.missing and set(self.paths) == {"layout_mismatch"}


class World:
    """The running deployment, and the engine that is started anew for each case."""

    def __init__(
        self, topology: Topology, remote: ProcessPart, http: aiohttp.ClientSession
    ) -> None:
        self.topology, self.remote, self.http = topology, remote, http
        self.url = topology.gateway_url

    async def run(self, name: str, case: Case) -> Row:
        row, part = Row(), self._part(name, case)
        try:
            async with started([[part]]):
                await self._until_announced(bool(case.fact))
                await self._ask(name, row)
                if case.fact:
                    await self._look(case, row)
        except PrfaasError as error:
            row.refused = str(error).splitlines()[-1].strip()[:200]
        return row

    def _part(self, name: str, case: Case) -> ProcessPart:
        part = copy.copy(self.remote)
        args = [*self.remote.command.args, *case.args]
        part.warm_up = None
        if case.change is not None:
            there = self.topology.deployment.state / "models" / name.replace(" ", "-")
            shutil.copytree(self.topology.deployment.model.path, there)
            case.change(there)
            args += ["--model", str(there), "--tokenizer", str(there)]
        part.command = Command(args, self.remote.command.env | case.env)
        return part

    async def _json(self, path: str) -> dict[str, Any]:
        async with self.http.get(f"{self.url}{path}") as reply:
            found: dict[str, Any] = await reply.json()
            return found

    async def _until_announced(self, differs: bool) -> None:
        """Wait until the gateway knows what this case is about."""
        async with asyncio.timeout(SEEN_S):
            while True:
                async with self.http.get(f"{self.url}/health?full=parts") as reply:
                    is_here = reply.status == 200
                async with self.http.get(f"{self.url}/health?full=1") as reply:
                    if is_here and (reply.status == 200) != differs:
                        return
                await asyncio.sleep(0.2)

    async def _ask(self, name: str, row: Row) -> None:
        before = await self._arrived()
        for number in range(NUM_PROMPTS):
            text = f"{name} {number}. " + "Of what was said before, say it again. " * (60 + number)
            answer, headers = await self._chat(self.url, text)
            alone, _ = await self._chat(
                self.topology.engines["pd-engine"], text, cache_salt=f"alone {name} {number}"
            )
            row.num_wrong += answer != alone
            is_remote = headers["X-Prfaas-Path"] == "remote"
            row.paths.append("remote" if is_remote else headers["X-Prfaas-Reason"])
        row.kv_bytes = await self._arrived() - before

    async def _chat(self, url: str, text: str, **extra: object) -> tuple[str, dict[str, str]]:
        body = {
            "model": self.topology.deployment.model.name,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": 24,
        } | extra
        async with self.http.post(f"{url}/v1/chat/completions", json=body) as reply:
            found = await reply.json()
            assert reply.status == 200, found
            return found["choices"][0]["message"]["content"], dict(reply.headers)

    async def _arrived(self) -> float:
        """Bytes of KV cache that came over the link."""
        text = await self._text("/metrics")
        lines = [line for line in text.splitlines() if line.startswith("prfaas_kv_bytes_total{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def _text(self, path: str) -> str:
        async with self.http.get(f"{self.url}{path}") as reply:
            return await reply.text()

    async def _look(self, case: Case, row: Row) -> None:
        """Find the fact in every place that has to name it."""
        status = await self._json("/control/status")
        [found] = status["layout_mismatches"]
        words = row.words = found["words"]
        facts = {each["fact"] for each in found["differences"]}
        record = (await self._json("/control/requests?limit=1"))["requests"][0]
        state = await self._json("/console/api/state")
        alarms = [alarm for alarm in state["alarms"] if alarm["name"] == "layout_mismatch"]
        agrees = f'prfaas_layout_mismatch{{engine="{REMOTE}"}} 0.0'
        places = {
            "facts": case.fact in facts,
            "health": words in (await self._json("/health?full=1"))["error"]["message"],
            "ctl status": words in joined(status_lines(status)),
            "console": any(words in alarm["text"] for alarm in alarms),
            "explanation": words in record["explanation"],
            "metric": agrees not in await self._text("/metrics"),
        }
        row.missing = [name for name, is_there in places.items() if not is_there]


@contextlib.asynccontextmanager
async def world() -> AsyncIterator[World]:
    """Everything but the engine of the PrfaaS cluster."""
    with tempfile.TemporaryDirectory(prefix="mismatch-") as local:
        topology = await laid_out(*placed(LAPTOP, Path(local)))
        stages = parts(topology)
        remote = next(part for stage in stages for part in stage if part.name == REMOTE)
        for stage in stages:
            for part in stage:
                part.whole_url = ""
        rest = [[part for part in stage if part is not remote] for stage in stages]
        async with started(rest), aiohttp.ClientSession() as http:
            yield World(topology, remote, http)


async def main(names: list[str], limit_s: float) -> bool:
    """Run the cases; False if one of them is not as it has to be."""
    is_good, began_s = True, time.monotonic()
    print("| altered at the PrfaaS site | path | wrong | KV bytes | named |")
    print("|---|---|---|---|---|", flush=True)
    async with world() as made:
        for name in names:
            if time.monotonic() - began_s > limit_s:
                print(f"not run: {name}", flush=True)
                continue
            row = await made.run(name, CASES[name])
            is_good &= row.is_good(CASES[name])
            named = row.words or (f"engine refused: {row.refused}" if row.refused else "nothing")
            if row.missing:
                named += f" (NOT in {', '.join(row.missing)})"
            paths = ", ".join(dict.fromkeys(row.paths)) or "-"
            wrong = f"{row.num_wrong} of {len(row.paths)}"
            print(f"| {name} | {paths} | {wrong} | {row.kv_bytes:,.0f} | {named} |", flush=True)
    return is_good


if __name__ == "__main__":
    words = sys.argv[1:]
    seconds = float(words.pop(1)) if words[:1] == ["--seconds"] else 3600.0
    chosen = [word for word in words if word != "--seconds"] or list(CASES)
    sys.exit(not asyncio.run(main(chosen, seconds)))
