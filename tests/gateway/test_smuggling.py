"""Nothing of the client's reaches the engines' caches or transfers."""

from __future__ import annotations

import json

import pytest

from prfaas.deployment_secret import deployment_secret

from .conftest import World
from .prompts import LONG, SHORT

EVIL = {"transfer": "00" * 16, "source": "prfaas-pool", "wait_ms": 10**9, "evil": "smuggled"}
BODY = {
    "kv_transfer_params": {"prfaas": EVIL, "prompt_token_ids": [1], "do_remote_prefill": True},
    "ec_transfer_params": {"evil": "smuggled"},
    "kv_hints": {"evil": "smuggled"},
    "cache_salt": "smuggled",
    "request_id": "smuggled",
    "bootstrap_host": "smuggled",
    "bootstrap_port": 1,
    "bootstrap_room": 1,
    "vllm_xargs": {"kv_transfer_params": "smuggled", "ec_transfer_params": "smuggled", "fine": 1},
}
HEADERS = {
    "x-prefiller-host-port": "smuggled",
    "x-kv-cache-source-host-port": "smuggled",
    "x-data-parallel-rank": "smuggled",
    "x-worker-instance-id": "smuggled",
    "x-session-id": "smuggled",
    "authorization": "Bearer smuggled",
    "cookie": "smuggled",
    "traceparent": "smuggled",
}


@pytest.mark.parametrize("text", [SHORT, LONG])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["completions", "chat", "tools"])
async def test_control_keys_and_headers_stay_out(
    world: World, text: str, stream: bool, kind: str
) -> None:
    body = BODY | {"stream": stream, "prompt": text}
    if kind != "completions":
        body |= {"messages": [{"role": "user", "content": text, "cache_salt": "x"}]}
    if kind == "tools":
        body |= {"tools": [{"type": "function", "function": {"name": "f"}}]}
    path = "/v1/completions" if kind == "completions" else "/v1/chat/completions"
    async with world.http.post(world.url + path, json=body, headers=HEADERS) as response:
        assert response.status == 200
        reply = await response.text()
    calls = world.prefill.calls + world.decode.calls
    # A prefill leg, a rehearsal of the fields, and a decode leg.
    assert len(calls) == (3 if text is LONG else 1)
    for call in calls:
        assert "smuggled" not in json.dumps([call.headers, call.body])
        # The client's salt parts the blocks of its tenant, and leaves them the tenant's.
        assert call.body["cache_salt"].partition(".")[0] == world.salt
        assert not any(key.startswith("bootstrap_") for key in call.body)
        parameters = call.body.get("kv_transfer_params", {}).get("prfaas")
        is_rehearsal = call.headers["x-request-id"].endswith("-v")
        assert (parameters is not None) == (text is LONG and not is_rehearsal)
        assert parameters is None or parameters["transfer"] != EVIL["transfer"]
    assert world.decode.calls[-1].body["vllm_xargs"] == {"fine": 1}
    assert "private" not in reply
    assert world.salt not in reply


async def test_the_salt_is_secret(
    world: World, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG")
    world.prefill.script = None
    await world.post({"prompt": LONG})
    await world.post({"prompt": "secret prompt", "max_tokens": -1})
    assert len(world.salt) >= 43
    shown = caplog.text + "".join(capsys.readouterr())
    for url in ("/metrics", "/control/requests", "/health", "/v1/models"):
        async with world.http.get(world.url + url) as response:
            shown += await response.text()
    assert world.salt not in shown
    assert deployment_secret(world.state).decode() not in shown
    assert "long prompt" not in shown
    assert "secret prompt" not in shown
