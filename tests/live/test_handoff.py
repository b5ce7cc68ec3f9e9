"""The main job on real engines: prefill there, decode here, the same words."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from prfaas.core.admission.quotas import Quota, TenantLimits
from prfaas.core.kv.tenant_salts import salt_of
from prfaas.deployment_secret import deployment_secret
from prfaas.gateway.openai.requests import Api, parse_request
from prfaas.gateway.tenancy.tenants import DEFAULT_NAME, Tenant
from prfaas.gateway.tokenization.prompt_encoder import PromptMaker
from tests.live.conftest import LEFT, Live, document
from tests.live.handoff_sizes import ATTENTION_GROUP, BLOCK_TOKENS, LINEAR_GROUPS, planned_bytes

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="session"),
]


@pytest.mark.parametrize("num_chars", [2000, 5000, 9000, 12000])
async def test_a_long_prompt_is_prefilled_remotely_with_the_same_answer(
    live: Live, num_chars: int
) -> None:
    text = f"[{num_chars}] " + document(num_chars)
    pd_pool = live.pool_admin("pd-pool")
    before = {
        group: await live.metric(pd_pool, "prfaas_pool_blocks_loaded_total", group=group)
        for group in (*LINEAR_GROUPS, ATTENTION_GROUP)
    }
    answer, headers = await live.chat(text)
    record = await live.record(headers["X-Request-Id"])

    assert headers["X-Prfaas-Path"] == "remote"
    assert record["fallback"] is None
    assert answer["choices"][0]["message"]["content"] == await live.alone(text, str(num_chars))

    num_tokens = answer["usage"]["prompt_tokens"]
    num_blocks = (num_tokens - 1) // BLOCK_TOKENS
    loaded = {
        group: await live.metric(pd_pool, "prfaas_pool_blocks_loaded_total", group=group) - count
        for group, count in before.items()
    }
    assert loaded[ATTENTION_GROUP] == num_blocks
    assert [loaded[group] for group in LINEAR_GROUPS] == [1, 1, 1]
    assert record["kv_bytes"] == planned_bytes(live, num_tokens)


async def test_a_short_prompt_stays_local(live: Live) -> None:
    text = "What is a prefix cache good for?"
    answer, headers = await live.chat(text)
    assert headers["X-Prfaas-Path"] == "local"
    assert headers["X-Prfaas-Reason"] == "below_threshold"
    assert answer["choices"][0]["message"]["content"] == await live.alone(text, "short")


async def test_a_follow_up_finds_the_document_in_the_pd_cluster(live: Live) -> None:
    text = "Remember this. " + document(4000, start=500)
    first, _ = await live.chat(text)
    reply = first["choices"][0]["message"]["content"]
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": "And now?"},
    ]
    second, headers = await live.chat("", messages=messages)
    assert headers["X-Prfaas-Path"] == "local"
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (first["usage"]["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    expected = await live.alone("", "follow-up", messages=messages)
    assert second["choices"][0]["message"]["content"] == expected


async def test_cached_tokens_are_those_of_the_cluster_that_prefilled(live: Live) -> None:
    """The decode leg finds everything cached; the client must not be told so."""
    answer, headers = await live.chat("Never seen. " + document(3000, start=2000))
    assert headers["X-Prfaas-Path"] == "remote"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_the_openai_client_streams(live: Live) -> None:
    text = "Stream this. " + document(3500, start=1500)
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model=live.model,
            messages=[{"role": "user", "content": text}],
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == await live.alone(text, "stream")
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 24


async def test_completions_take_text_and_token_ids(live: Live) -> None:
    text = document(2600, start=3000)
    url = f"{live.topology.engines['pd-engine']}/tokenize"
    async with live.http.post(url, json={"model": live.model, "prompt": text}) as reply:
        token_ids = (await reply.json())["tokens"]
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as client:
        answers = [
            await client.completions.create(
                model=live.model, prompt=prompt, max_tokens=16, temperature=0
            )
            for prompt in (text, token_ids)
        ]
    assert answers[0].choices[0].text == answers[1].choices[0].text
    assert [answer.usage.prompt_tokens for answer in answers if answer.usage] == [2600, 2600]


async def test_prompts_are_tokenised_as_the_engine_does(live: Live) -> None:
    text = "Grüße, 東京! \n\t<|im_end|> {{ 7 * 7 }}"
    body = live.chat_body(text)
    url = f"{live.topology.engines['pd-engine']}/tokenize"
    async with live.http.post(
        url, json={"model": live.model, "messages": body["messages"]}
    ) as reply:
        expected = (await reply.json())["count"]
    answer, _ = await live.chat(text)
    assert answer["usage"]["prompt_tokens"] == expected


async def test_a_growing_conversation_is_tokenised_as_the_engine_does(live: Live) -> None:
    """The gateway tokenises only what is new; the engine's own ids say whether that is right."""
    path = live.topology.deployment.model.path
    maker = await asyncio.to_thread(PromptMaker, path)
    url = f"{live.topology.engines['pd-engine']}/tokenize"
    messages: list[dict[str, str]] = [{"role": "system", "content": document(3000)}]
    for turn in (
        "<|im_end|> in a question?",
        "Grüße, 東京!\n\n e\u0301",
        "x" * 2500,
        " \t and so on",
    ):
        messages.append({"role": "user", "content": f"{turn} {document(1200, start=len(turn))}"})
        body = {"model": live.model, "messages": messages}
        async with live.http.post(url, json=body) as reply:
            expected = (await reply.json())["tokens"]
        client = parse_request(json.dumps(body).encode(), Api.CHAT, live.model, maker.vocab_size)
        tenant = Tenant("default", "salt", Quota(TenantLimits()))
        prompt = await maker.prompt(client, tenant, None, 16384)
        assert list(prompt.token_ids) == expected
        messages.append({"role": "assistant", "content": document(500, start=700)})
    maker.close()


async def test_logs_hold_no_prompt_and_no_salt(live: Live) -> None:
    secret = "xylophone-prompt-4711"
    await live.chat(f"{secret} " + document(2000))
    await live.chat(secret)
    secret_of_salts = deployment_secret(live.topology.deployment.state)
    salt = salt_of(secret_of_salts, DEFAULT_NAME)
    for log in (live.topology.deployment.state / "logs").iterdir():
        words = log.read_text(errors="replace")
        assert secret not in words, log
        assert salt not in words, log
        assert secret_of_salts.decode() not in words, log


async def test_only_what_the_pd_cluster_lacks_is_shipped(live: Live) -> None:
    seen = "A prefix. " + document(4000, start=700)
    first, _ = await live.chat(seen)
    known_blocks = (first["usage"]["prompt_tokens"] - 1) // BLOCK_TOKENS

    longer = seen[: known_blocks * BLOCK_TOKENS + 100] + document(5000, start=5000)
    answer, headers = await live.chat(longer)
    record = await live.record(headers["X-Request-Id"])
    assert (record["path"], record["fallback"]) == ("remote", None)
    assert record["pd_hit_tokens"] == known_blocks * BLOCK_TOKENS
    num_tokens = answer["usage"]["prompt_tokens"]
    assert record["kv_bytes"] == planned_bytes(live, num_tokens, known_blocks * BLOCK_TOKENS)
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == known_blocks * BLOCK_TOKENS
    assert answer["choices"][0]["message"]["content"] == await live.alone(longer, "longer")


async def test_several_at_once_are_all_answered(live: Live) -> None:
    """Batches change the last bits of bf16, so only completeness is compared here."""
    sizes = [300, 2500, 6000, 4000, 300, 9000, 2500, 5000]
    texts = [f"[{number} at once] " + document(size) for number, size in enumerate(sizes)]
    answers = await asyncio.gather(*(live.chat(text) for text in texts))
    records = [await live.record(headers["X-Request-Id"]) for _, headers in answers]
    assert [record["path"] for record in records].count("remote") == 6
    fallbacks = [record["fallback"] for record in records if record["fallback"]]
    assert {f"{each['stage']}/{each['reason']}" for each in fallbacks} <= set(LEFT)
    assert all(answer["usage"]["completion_tokens"] == 24 for answer, _ in answers)
