"""Values in the forms in which vLLM reads them, and salts of clients."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.kv.tenant_salts import tenant_tag
from prfaas.errors import RequestError
from prfaas.gateway.openai.requests import Api, ClientRequest, parse_request
from prfaas.gateway.tenancy.tenants import key_hash, new_key
from tests.engines.vllm_modules import needing_vllm
from tests.gateway.conftest import World, running
from tests.gateway.prompts import LONG

chats = needing_vllm("vllm.entrypoints.openai.chat_completion.protocol")
completions = needing_vllm("vllm.entrypoints.openai.completion.protocol")

MESSAGES = [{"role": "user", "content": "hi"}]
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, -1, 5.0, 0.7, 1e20, 2**70, "", "1", "5.0", " 5 ", "5_0", "1e1"),
    *("0.7", "inf", "nan", "off", "null", [], [1], ["1"], [5.0], [True], {}, {"5": 1}),
)
CHANGED = ("temperature", "top_p", "top_k", "seed", "min_tokens", "stop_token_ids", "stream")
MORE = (*CHANGED, "ignore_eos", "skip_special_tokens", "allowed_token_ids", "frequency_penalty")
ASSISTANT_ONLY = (*MORE, "parallel_tool_calls", "include_reasoning", "logprobs")


def parsed(api: Api, **fields: Any) -> ClientRequest:
    body: dict[str, Any] = {"prompt": "hi"} if api is Api.COMPLETIONS else {"messages": MESSAGES}
    return parse_request(body | fields, api, "m", 300)


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize("name", ASSISTANT_ONLY)
def test_a_value_is_what_vllm_makes_of_it(name: str, value: object) -> None:
    """Both read it as the same value, or the gateway reads what vLLM refuses."""
    kind = chats.ChatCompletionRequest
    try:
        theirs = getattr(kind.model_validate({"messages": MESSAGES, name: value}), name)
    except Exception:
        return
    if isinstance(theirs, float) and not math.isfinite(theirs):
        # vLLM refuses it later; JSON has no word for it.
        with pytest.raises(RequestError, match=name):
            parsed(Api.CHAT, **{name: value})
        return
    ours = parsed(Api.CHAT, **{name: value}).body.get(name)
    # Absent is vLLM's default.
    assert ours == theirs or (ours is None and value is None)


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ([72.0, 73], [[72, 73]]),
        ([72, "73"], [[72, 73]]),
        (["72", "73"], ["72", "73"]),
        ([[72.0], [73]], [[72], [73]]),
        ([True, 73], [[1, 73]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_token_ids_have_forms_too(prompt: object, found: object) -> None:
    assert parsed(Api.COMPLETIONS, prompt=prompt).prompts == found


@pytest.mark.parametrize("prompt", [[72.5], [72, "a"], [[72], 1], [1e20], [None], [{}]])
def test_what_is_no_token_id_is_refused(prompt: object) -> None:
    with pytest.raises(RequestError):
        parsed(Api.COMPLETIONS, prompt=prompt)


@pytest.mark.parametrize("api", Api)
async def test_the_rest_of_the_context_ends_an_answer(world: World, api: Api) -> None:
    text = "x" * 4000
    body: dict[str, Any] = {"prompt": text}
    if api is Api.CHAT:
        body = {"messages": [{"role": "user", "content": text}]}
    path = "/v1/chat/completions" if api is Api.CHAT else "/v1/completions"
    for limit in (4000, "4000", None):
        status, answer = await world.post(body | {"max_tokens": limit}, path)
        assert status == 200, answer
        num_prompt = len(world.decode.calls[-1].body["prompt"])
        num_prompt += 0 if api is Api.CHAT else 4000 - num_prompt
        if limit is not None:
            assert world.decode.calls[-1].body["max_tokens"] == 4096 - num_prompt


async def test_null_reaches_no_engine(world: World) -> None:
    body = {"messages": MESSAGES, "n": None, "temperature": None, "stream_options": None}
    assert (await world.post(body, "/v1/chat/completions"))[0] == 200
    assert not {"n", "temperature", "stream_options"} & world.decode.calls[-1].body.keys()


async def test_a_client_has_salts_within_its_tenants(world: World) -> None:
    salts = []
    for salt in ("a", "b", "a", None):
        assert (await world.post({"prompt": LONG, "cache_salt": salt}))[0] == 200
        salts.append(world.decode.calls[-1].body["cache_salt"])
    assert salts[0] == salts[2]
    assert len(set(salts)) == 3
    assert salts[3] == world.salt
    # Whose blocks they are, purges and shares do not change by it.
    assert {tenant_tag(salt) for salt in salts} == {tenant_tag(world.salt)}
    assert "a" not in salts[0].split(".")


@pytest.mark.parametrize("salt", ["", 5, "a@b", "a/b", "a\\b", "a\x00", "x" * 129, ["a"], False, 0])
async def test_other_salts_are_refused_as_by_vllm(world: World, salt: object) -> None:
    status, answer = await world.post({"prompt": "hi", "cache_salt": salt})
    assert (status, answer["error"]["param"]) == (400, "cache_salt")


async def test_the_same_salt_of_two_tenants_and_of_two_users_is_not_one(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    keys = {name: new_key() for name in ("red", "blue")}
    tenants = {name: {"keys": [key_hash(key)], "isolate_users": True} for name, key in keys.items()}
    async with running(checkpoint, identities, tmp_path / "s", tenants=tenants) as world:
        found = set()
        for key in keys.values():
            for user in ({"user": "u"}, {"user": "v"}, {"safety_identifier": "u"}, {}):
                headers = {"Authorization": f"Bearer {key}"}
                body = {"prompt": LONG, "cache_salt": "a", **user}
                url = f"{world.url}/v1/completions"
                async with world.http.post(url, json=body, headers=headers) as reply:
                    assert reply.status == 200, await reply.text()
                found.add(world.decode.calls[-1].body["cache_salt"])
        assert len(found) == 6


@pytest.mark.parametrize("user", [0, False, [], {}, 1, ["u"]])
async def test_no_value_shares_the_blocks_of_isolated_users_in_silence(
    checkpoint: Path, identities: Path, tmp_path: Path, user: object
) -> None:
    key = new_key()
    tenants = {"red": {"keys": [key_hash(key)], "isolate_users": True}}
    async with running(checkpoint, identities, tmp_path / "s", tenants=tenants) as world:
        body = {"prompt": LONG, "safety_identifier": user}
        headers = {"Authorization": f"Bearer {key}"}
        url = f"{world.url}/v1/completions"
        async with world.http.post(url, json=body, headers=headers) as reply:
            assert reply.status == 400
            assert "safety_identifier" in await reply.text()
