"""The engine that decodes is killed in mid-answer; the other one goes on, with real tokens."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import pytest

from prfaas.config.clusters import ClusterRole
from prfaas.config.deployment import Deployment
from prfaas.gateway.openai.requests import ClientRequest
from prfaas.gateway.serving.decode_leg import StreamHandover
from prfaas.gateway.serving.request_state import Exchange
from prfaas.gateway.serving.routing_step import RoutedPrompt
from prfaas.gateway.tokenization.prompt_encoder import EncodedPrompt
from tests.live.conftest import Live, gateway_over

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="session"),
]

NUM_TOKENS = 120
KILL_AFTER = 40
TEXT = "Größe, 世界, 👋🏽: go on."


def all_decode(deployment: Deployment) -> Deployment:
    """The same parts as one PD cluster: an engine's role is what a gateway gives it to do."""
    clusters = deployment.clusters.values()
    one = deployment.with_role(ClusterRole.PD)[0].model_copy(
        update={
            "pools": {name: pool for c in clusters for name, pool in c.pools.items()},
            "engines": {name: engine for c in clusters for name, engine in c.engines.items()},
        }
    )
    return deployment.model_copy(update={"clusters": {"pd": one}})


async def post(live: Live, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Ask the engine that lives on."""
    url = live.topology.engines["pd-engine"] + path
    async with live.http.post(url, json={"model": live.model} | body) as reply:
        answer: dict[str, Any] = await reply.json()
        assert reply.status == 200, answer
        return answer


async def test_the_answer_goes_on_where_it_was(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the seam it is what one engine says, behind it what one says from there.

    Over the whole length it may differ: the second engine computes the tokens so far as a prompt,
    in another order of additions than one by one.
    """
    seams: list[tuple[list[int], list[int]]] = []
    find_seam = StreamHandover.seam

    async def seam(
        self: StreamHandover, exchange: Exchange, plan: RoutedPrompt
    ) -> tuple[ClientRequest, EncodedPrompt]:
        rest, prompt = await find_seam(self, exchange, plan)
        seams.append((list(plan.prompt.token_ids), list(prompt.token_ids)))
        return rest, prompt

    monkeypatch.setattr(StreamHandover, "seam", seam)
    expected = await live.alone(TEXT, "continued", max_tokens=NUM_TOKENS)
    body = live.chat_body(TEXT, max_tokens=NUM_TOKENS, stream=True)
    body["stream_options"] = {"include_usage": True}
    text, events = "", []
    one_cluster = all_decode(live.topology.deployment)
    async with gateway_over(live, one_cluster) as (gateway, other):
        # The stream begins at the engine that is going to die.
        gateway.driver.set_drained("pd-engine", time.monotonic_ns(), drained=True)
        async with live.http.post(f"{other.url}/v1/chat/completions", json=body) as reply:
            assert reply.status == 200
            async for line in reply.content:
                if not line.startswith(b"data: {"):
                    continue
                events.append(json.loads(line[6:]))
                assert "error" not in events[-1], events[-1]
                text += "".join(c["delta"].get("content", "") for c in events[-1]["choices"])
                if len(events) == KILL_AFTER:
                    gateway.driver.set_drained("pd-engine", time.monotonic_ns(), drained=False)
                    live.supervisor.part("prfaas-engine").signal(signal.SIGKILL)
        record = gateway.records.latest(1)[0]
    assert record.fallback is not None
    assert (record.fallback.stage, record.decode_engine) == ("decode", "pd-engine")
    [(prompt, so_far)] = seams
    done = so_far[len(prompt) :]
    assert so_far[: len(prompt)] == prompt
    assert len(done) >= KILL_AFTER - 2
    before = (await post(live, "/detokenize", {"tokens": done}))["prompt"]
    body = {"prompt": so_far, "max_tokens": NUM_TOKENS - len(done), "temperature": 0}
    rest = await post(live, "/v1/completions", body | {"cache_salt": "alone behind the seam"})
    assert text == before + rest["choices"][0]["text"]
    assert expected.startswith(before)
    assert len({event["id"] for event in events}) == 1
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] == NUM_TOKENS
    assert usage["total_tokens"] == usage["prompt_tokens"] + NUM_TOKENS
    await live.supervisor.restart("prfaas-engine")
    await live.remote_again("continued")
