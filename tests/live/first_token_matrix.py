"""One table: how answers end whose first token comes from the engine that prefills.

    python -m tests.live.first_token_matrix [--kinds "abort,hang decode"]

Real vLLM on the CPU: an engine that prefills and two that decode, pool nodes with a wire to hold,
and a gateway. In every row three requests are on their way at once: greedy and streamed, sampled
without a choice and streamed, and that as a whole. They end by themselves, their clients leave, or
an engine is stopped or killed, in each phase. Each answer has to be that of one engine, its tokens
are counted once, and nothing is left behind in gateway, pools and engines. Exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import secrets
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.live.conftest import Live, document, until
from tests.live.first_tokens import FLOAT32, LETTERS, ask, running, settings

SPARE = f"""
[clusters.pd.engines.pd-spare]
pool = "pd-pool"
args = {json.dumps(FLOAT32)}
host_memory = "256MiB"
kv_cache_memory = "256MiB"
"""
PREFILL, DECODE = "prfaas-engine", "pd-engine"
SAMPLED = {"temperature": 1.0, "top_p": 1e-6}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
FORMS: dict[str, dict[str, Any]] = {
    "greedy, streamed": {"temperature": 0} | USAGE,
    "sampled, streamed": SAMPLED | USAGE,
    "sampled, whole": SAMPLED | {"stream": False},
}
COUNTS, ENDS = ("prompt_tokens", "completion_tokens"), ("finish_reason", "stop_reason")
KINDS = ("texts", "abort", "hang prefill", "hang decode", "death prefill", "death decode")
# Queued: the gateway has the requests, and nothing else is known.
PHASES = ("queued", "prefilling", "transfer", "decoding")
NUM_PROMPT, NUM_OUTPUT, BEGUN = 3000, 60, 5
ANSWER_S, IDLE_S = 300.0, 60.0
OF_GATEWAY = (
    "prfaas_requests_in_flight",
    "prfaas_tenant_requests_in_flight",
    "prfaas_tenant_requests_held",
    "prfaas_route_link_promised_bytes",
    "prfaas_prefill_backlog_seconds",
)
OF_POOLS = (
    "prfaas_open_transfers",
    "prfaas_pool_leased_blocks",
    "prfaas_pool_pinned_blocks",
    "prfaas_pool_promised_bytes",
)
OF_ENGINES = ("vllm:num_requests_running", "vllm:num_requests_waiting")


@dataclass
class Client:
    """One request through the gateway.

    Attributes:
        body: Of it.
        expected: The answer of one engine.
        events: What has come of a stream.
    """

    live: Live
    body: dict[str, Any]
    expected: dict[str, Any]
    request_id: str = field(default_factory=lambda: f"matrix-{secrets.token_hex(6)}")
    events: list[dict[str, Any]] = field(default_factory=list)

    async def run(self) -> dict[str, Any]:
        """The answer: text, counts and end."""
        url, headers = f"{self.live.url}/v1/completions", {"X-Request-Id": self.request_id}
        async with self.live.http.post(url, json=self.body, headers=headers) as reply:
            if reply.status != 200 or not self.body["stream"]:
                self.events.append(await reply.json())
            else:
                async for line in reply.content:
                    if line.startswith(b"data: {"):
                        self.events.append(json.loads(line[6:]))
        if "error" in self.events[-1]:
            raise RuntimeError(str(self.events[-1]["error"])[:300])
        choices = [event["choices"][0] for event in self.events if event["choices"]]
        ends = {key: choices[-1][key] for key in ENDS}
        text = "".join(choice["text"] for choice in choices)
        counts = {key: self.events[-1]["usage"][key] for key in COUNTS}
        return counts | ends | {"text": text}


class Matrix:
    """Runs the rows, and prints them."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._dead = ""
        """Engine that was killed."""
        self.is_good = True

    async def clients(self, **more: Any) -> dict[str, Client]:
        """Requests of all forms; `more` are fields of them."""
        live, found, number = self._live, {}, itertools.count(2)
        for name, form in FORMS.items():
            salt = secrets.token_hex(4)
            prompt = f"{salt} " + document(more.get("num_prompt", NUM_PROMPT), start=next(number))
            body = {"model": live.model, "prompt": prompt, "allowed_token_ids": LETTERS} | form
            body |= {"max_tokens": NUM_OUTPUT} | {
                k: v for k, v in more.items() if k != "num_prompt"
            }
            engine = live.topology.engines[DECODE]
            alone = body | {"cache_salt": salt}
            await ask(live, engine, alone)
            expected = await ask(live, engine, alone)
            if more.get("stop") and body["stream"]:
                # From the first token into the second.
                body["stop"] = [expected["text"][:2]]
                expected = await ask(live, engine, body | {"cache_salt": salt})
            elif more.get("stop"):
                del body["stop"]
            kept = {key: expected[key] for key in (*COUNTS, *ENDS, "text")}
            found[name] = Client(live, body, kept)
        return found

    async def row(
        self, name: str, clients: dict[str, Client], harm: Callable[..., Awaitable[None]] | None
    ) -> None:
        """Send the requests, do harm, and print what became of them."""
        tasks = {form: asyncio.create_task(each.run()) for form, each in clients.items()}
        cells: list[str] = []
        try:
            async with asyncio.timeout(ANSWER_S):
                if harm is not None:
                    await harm(clients, tasks)
                for form, task in tasks.items():
                    cells.append(await self._cell(clients[form], task))
        except TimeoutError:
            cells = [*cells, *["no end"] * (len(FORMS) - len(cells))]
        finally:
            for task in tasks.values():
                task.cancel()
            await self.recover()
        left = await self._left()
        self.is_good &= not left and all(cell.startswith("same") for cell in cells)
        print(f"| {name} | {' | '.join(cells)} | {left or 'nothing'} |", flush=True)

    async def _cell(self, client: Client, task: asyncio.Task[dict[str, Any]]) -> str:
        try:
            said = await task
        except asyncio.CancelledError:
            record = await self._live.record(client.request_id)
            return "same: left" if record["outcome"] == "cancelled" else record["outcome"]
        except Exception as error:
            return f"error: {error}"
        record = await self._live.record(client.request_id)
        if said != client.expected:
            other = {k: (v, said[k]) for k, v in client.expected.items() if said[k] != v}
            return f"OTHER: {other}, {record['fallback']}"
        if record["num_output_tokens"] != said["completion_tokens"]:
            return f"COUNTED {record['num_output_tokens']}"
        back = record["fallback"]
        return f"same, {record['first_token_from']}" + (
            f", {back['stage']}/{back['reason']}" if back else ""
        )

    async def _left(self) -> str:
        """Figures that are not as before a minute later; empty if all are."""
        found = dict[str, float]()

        async def is_clean() -> bool:
            found.clear()
            live = self._live
            pages = [
                (live.url, OF_GATEWAY),
                *((live.pool_admin(p), OF_POOLS) for p in live.topology.pools),
            ]
            pages += [(url, OF_ENGINES) for url in live.topology.engines.values()]
            for url, names in pages:
                for name in names:
                    if value := await live.metric(url, name):
                        found[name] = value
            return not found

        with contextlib.suppress(TimeoutError):
            await until(is_clean, IDLE_S)
        return ", ".join(f"{name} {value:g}" for name, value in found.items())

    async def recover(self) -> None:
        """Have everything go on, and wait until the gateway uses all of it."""
        live = self._live
        live.relay.release()
        for name in live.topology.engines:
            live.supervisor.part(name).signal(signal.SIGCONT)
        if self._dead:
            await live.supervisor.restart(self._dead)
            self._dead = ""
        await self._drain("pd-spare", drained=True)

        async def is_whole() -> bool:
            ready = [
                await live.metric(live.url, "prfaas_engine_ready", engine=engine)
                for engine in live.topology.engines
            ]
            return all(ready) and await live.metric(live.url, "prfaas_route_link_up") > 0

        await until(is_whole, ANSWER_S)

    async def _drain(self, engine: str, *, drained: bool) -> None:
        url = f"{self._live.url}/control/engines/{engine}"
        async with self._live.http.post(url, json={"drained": drained}) as reply:
            assert reply.status == 200, await reply.text()

    async def before(self, phase: str) -> float:
        """Prepare a phase; blocks that were stored before it."""
        live = self._live
        if phase == "transfer":
            live.relay.hold()
        return await live.metric(live.pool_admin("prfaas-pool"), "prfaas_pool_blocks_stored_total")

    async def reached(self, phase: str, clients: dict[str, Client], stored: float) -> None:
        """Wait until the requests are in a phase."""
        live = self._live

        async def is_there() -> bool:
            if phase == "prefilling":
                now = await live.metric(
                    live.pool_admin("prfaas-pool"), "prfaas_pool_blocks_stored_total"
                )
                return now > stored
            if phase == "queued":
                return await live.metric(live.url, "prfaas_requests_in_flight") == len(clients)
            least = 1 if phase == "transfer" else BEGUN
            return all(len(c.events) >= least for c in clients.values() if c.body["stream"])

        await until(is_there, ANSWER_S)
        await self._drain("pd-spare", drained=False)

    async def in_phase(self, what: str, phase: str) -> None:
        """One row: clients leave, or an engine hangs or dies, in a phase."""
        verb, _, engine = what.partition(" ")
        clients = await self.clients()
        stored = await self.before(phase)
        part = self._live.supervisor.part(
            {"prefill": PREFILL, "decode": DECODE}.get(engine, PREFILL)
        )

        async def harm(
            clients: dict[str, Client], tasks: dict[str, asyncio.Task[dict[str, Any]]]
        ) -> None:
            await self.reached(phase, clients, stored)
            if verb == "abort":
                for task in tasks.values():
                    task.cancel()
            else:
                part.signal(signal.SIGSTOP if verb == "hang" else signal.SIGKILL)
                self._dead = part.name if verb == "death" else ""
            if phase == "transfer":
                self._live.relay.release()

        await self.row(f"{what}, {phase}", clients, harm)

    async def run(self, kinds: Sequence[str]) -> None:
        """Print the rows of some kinds."""
        print(f"| row | {' | '.join(FORMS)} | left behind |\n" + "|---" * (len(FORMS) + 2) + "|")
        await self.recover()
        for what in kinds:
            if what == "texts":
                await self._texts()
                continue
            for phase in PHASES:
                await self.in_phase(what, phase)

    async def _texts(self) -> None:
        texts: dict[str, dict[str, Any]] = {
            "stop string across the seam": {"stop": ["\0"]},
            "EOS first": {
                "allowed_token_ids": None,
                "logit_bias": {str(await self._eos()): 100},
            },
            "max_tokens 1": {"max_tokens": 1},
            "max_tokens 2": {"max_tokens": 2},
        }
        for name, more in texts.items():
            await self.row(name, await self.clients(num_prompt=500, **more), None)

    async def _eos(self) -> int:
        config = json.loads(
            (Path(self._live.topology.deployment.model.path) / "config.json").read_text()
        )
        return int(config["eos_token_id"])


async def run(kinds: Sequence[str]) -> bool:
    """Start everything, and print the table."""
    with tempfile.TemporaryDirectory(prefix="matrix-") as place:
        async with running(settings() + SPARE, Path(place)) as live:
            matrix = Matrix(live)
            await matrix.run(kinds)
            return matrix.is_good


def main() -> None:
    """Run the matrix."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS), help="of rows; a death is a restart")
    options = parser.parse_args()
    sys.exit(not asyncio.run(run(options.kinds.split(","))))


if __name__ == "__main__":
    main()
