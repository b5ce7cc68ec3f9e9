"""Wrong blocks under right names, before and after a purge, with real processes.

    python -m tests.poison                 timing engines; half a minute
    python -m tests.poison --engines vllm  real engines of examples/laptop.toml; some minutes
    python -m tests.poison --one-block     real engines, one zeroed block in eight; two minutes

A PrfaaS pool alters a byte of every block. Then it is replaced by an honest one and all engines
reset their caches. Then what came from it is purged. In every stage the same prompts are asked, and
longer ones that begin with them; an answer that is not the one of an engine alone is wrong.
Exits with 1 unless answers were wrong before the purge and none was after it.

With --one-block the first stage alone, and one block of a prompt is lost: the control of "identical
as alone". It exits with 1 unless that shows in an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp

from prfaas.cli.deploy.topology import Topology, parts
from prfaas.cli.supervision.supervisor import Supervisor
from tests.deployments import LAPTOP, ROOT, TIMING, laid_out, placed, started

SOURCE = "prfaas-pool"
PROMPTS = 6


class Experiment:
    """A running deployment, and what is asked of it."""

    def __init__(self, topology: Topology, http: aiohttp.ClientSession, prompts: list[str]) -> None:
        self._topology, self._http, self._prompts = topology, http, prompts
        self._right: list[str] = []

    async def learn(self) -> None:
        """Learn the answers of an engine alone, as a tenant that shares no block with others."""
        engine = next(
            self._topology.engines[name]
            for cluster in self._topology.deployment.clusters.values()
            if cluster.role.value == "pd"
            for name in cluster.engines
        )
        self._right = [await self._ask(engine, p, cache_salt="alone") for p in self._prompts]

    async def num_wrong(self) -> int:
        answers = [await self._ask(self._topology.gateway_url, p) for p in self._prompts]
        return sum(a != right for a, right in zip(answers, self._right, strict=True))

    async def reset_engines(self) -> None:
        """All that could be done before there was a purge."""
        for url in self._topology.engines.values():
            async with self._http.post(f"{url}/reset_prefix_cache?reset_external=true") as reply:
                if reply.status != 200 or not (await reply.json())["success"]:
                    raise RuntimeError(f"{url} does not reset its cache")

    async def is_linked(self) -> None:
        """Wait until long prompts are prefilled away."""
        while True:
            async with self._http.get(f"{self._topology.gateway_url}/control/status") as reply:
                links = (await reply.json())["links"]
            if links and all(link["is_up"] for link in links):
                return
            await asyncio.sleep(0.1)

    async def purge(self) -> dict[str, Any]:
        body = {"source": SOURCE}
        url = f"{self._topology.gateway_url}/control/purge"
        async with self._http.post(url, json=body) as reply:
            report: dict[str, Any] = await reply.json()
            if reply.status != 200 or not report["is_complete"]:
                raise RuntimeError(f"the purge is not done: {report}")
            return report

    async def _ask(self, url: str, prompt: str, **extra: object) -> str:
        body = {
            "model": self._topology.deployment.model.name,
            "prompt": prompt,
            "max_tokens": 16,
            "temperature": 0,
            **extra,
        }
        async with self._http.post(f"{url}/v1/completions", json=body) as reply:
            answer = await reply.json()
            if reply.status != 200:
                raise RuntimeError(f"{url} answers {reply.status}: {answer}")
            return str(answer["choices"][0]["text"])


def prompts_of(num_chars: int) -> list[str]:
    """Long prompts, and each again with more behind it: what is new there is computed at home."""
    text = (ROOT / "LICENSE").read_text() * (1 + num_chars // 5000)
    long = [f"[{number}] " + text[:num_chars] for number in range(PROMPTS)]
    return [*long, *(prompt + " And what follows from that? " + text[:400] for prompt in long)]


async def run(engines: str, local: Path, *, one_block: bool) -> list[tuple[str, int, int]]:
    """All stages: what was done, wrong answers, and answers."""
    example, num_chars = (TIMING, 120_000) if engines == "timing" else (LAPTOP, 3500)
    topology = await laid_out(*placed(example, local))
    flag = local / "alters"
    flag.write_text("block" if one_block else "byte")
    stages = parts(topology)
    part = next(part for stage in stages for part in stage if part.name == SOURCE)
    at = part.command.args.index("prfaas")
    part.command.args[at : at + 1] = ["tests.poison.altered_pool", str(flag)]
    part.command.env["PYTHONPATH"] = str(ROOT)
    prompts = prompts_of(num_chars)[: PROMPTS if one_block else None]
    limit = aiohttp.ClientTimeout(total=600)
    async with started(stages) as supervisor, aiohttp.ClientSession(timeout=limit) as http:
        experiment = Experiment(topology, http, prompts)
        if one_block:
            return [await first_stage(experiment, len(prompts))]
        return await all_stages(experiment, supervisor, flag, len(prompts))


async def first_stage(experiment: Experiment, count: int) -> tuple[str, int, int]:
    """Answers after the loss of one block in each prompt."""
    await experiment.learn()
    await experiment.is_linked()
    num_wrong = await experiment.num_wrong()
    print(f"one block of each prompt is zeroed: {num_wrong} of {count} answers wrong", flush=True)
    return "one block", num_wrong, count


async def all_stages(
    experiment: Experiment, supervisor: Supervisor, flag: Path, count: int
) -> list[tuple[str, int, int]]:
    rows: list[tuple[str, int, int]] = []

    async def stage(name: str) -> None:
        await experiment.is_linked()
        rows.append((name, await experiment.num_wrong(), count))
        print(f"{name:<52}{rows[-1][1]:>3} of {count} answers wrong", flush=True)

    await experiment.learn()
    await stage("a pool alters a byte of every block")
    await asyncio.to_thread(flag.unlink)
    await supervisor.restart(SOURCE)
    await experiment.reset_engines()
    await stage("the honest pool is back, all engines were reset")
    report = await experiment.purge()
    for pool in report["pools"]:
        print(f"  purged {pool['num_blocks']:,} blocks at {pool['name']}")
    print(f"  {len(report['engines'])} engines forgot what they held")
    await stage("after the purge")
    await stage("asked again")
    return rows


def main() -> None:
    """Run it and judge it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", choices=("timing", "vllm"), default="timing")
    parser.add_argument("--one-block", action="store_true")
    asked = parser.parse_args()
    engines = "vllm" if asked.one_block else asked.engines
    with tempfile.TemporaryDirectory() as local:
        rows = asyncio.run(run(engines, Path(local), one_block=asked.one_block))
    if asked.one_block:
        sys.exit(0 if rows[0][1] else 1)
    (_, altered, _), (_, honest, _), *after = rows
    if not (altered and honest) or any(wrong for _, wrong, _ in after):
        sys.exit(1)


if __name__ == "__main__":
    main()
