"""vLLM's HTTP surface, as clients see it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from prfaas.engines.checkpoint import make_checkpoint
from prfaas.engines.timing.api.generation import OWN_TOKENS
from prfaas.engines.timing.api.vocabulary import Vocabulary
from prfaas.engines.timing.host import InstanceHost
from prfaas.errors import ConfigError, RequestError
from prfaas.gateway.engines.engine import load_in
from prfaas.gateway.tokenization.chat_renderer import (
    ChatRenderer,
    compared_chats,
    template_variables,
)
from tests.pool.sites import until

from .worlds import MODEL, settings, started, write_plan

pytestmark = pytest.mark.timeout(180)
"""The first test imports transformers."""


@dataclass
class Engine:
    host: InstanceHost
    url: str
    http: aiohttp.ClientSession

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json=body) as reply:
            return reply.status, await reply.json()

    async def complete(self, prompt: object, **body: Any) -> Any:
        status, reply = await self.post("/v1/completions", model=MODEL, prompt=prompt, **body)
        assert status == 200, reply
        return reply

    async def stream(self, path: str = "/v1/completions", **body: Any) -> list[Any]:
        async with self.http.post(self.url + path, json={"stream": True, **body}) as reply:
            lines = (await reply.text()).split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    @property
    def instance(self) -> Any:
        return self.host.servers["e0"].instance


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tokenizer"
    make_checkpoint(path, weights=False)
    return path


@pytest.fixture
async def engine(checkpoint: Path, tmp_path: Path) -> AsyncIterator[Engine]:
    host, urls = await started(settings(write_plan(tmp_path), checkpoint, "e0"))
    async with aiohttp.ClientSession() as http:
        yield Engine(host, urls["e0"], http)
    await host.close()


async def test_the_same_prompt_has_the_same_answer(engine: Engine) -> None:
    one, again = [await engine.complete("Hello there", max_tokens=20) for _ in range(2)]
    assert one["choices"] == again["choices"]
    assert one["choices"][0]["finish_reason"] == "length"
    assert one["usage"]["completion_tokens"] == 20
    short = await engine.complete("Hello there")
    assert short["choices"][0]["text"] == one["choices"][0]["text"][:16]
    assert (await engine.complete("Hello where", max_tokens=20))["choices"] != one["choices"]


async def test_first_chats_that_come_together_load_one_template(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    load, loads = AutoTokenizer.from_pretrained, 0

    def counted(path: str) -> Any:
        nonlocal loads
        loads += 1
        return load(path)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", counted)
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    # A tag that only `transformers` knows.
    (model / "chat_template.jinja").write_text("{% generation %}Hi{% endgeneration %}")
    vocabulary, chat = Vocabulary(str(model)), {"messages": [{"role": "user", "content": "Hello"}]}
    texts = await asyncio.gather(*(vocabulary.render(chat) for _ in range(8)))
    assert texts == ["Hi"] * 8
    assert loads == 1


async def test_a_prefix_is_cached_up_to_a_block(engine: Engine) -> None:
    prompt = list(range(100))
    usages = [(await engine.complete(prompt))["usage"] for _ in range(2)]
    assert usages[0]["prompt_tokens_details"] is None
    assert usages[1]["prompt_tokens_details"] == {"cached_tokens": 96}
    longer = await engine.complete(prompt + [7] * 60)
    assert longer["usage"]["prompt_tokens_details"] == {"cached_tokens": 96}
    other = await engine.complete(prompt, cache_salt="another")
    assert other["usage"]["prompt_tokens_details"] is None
    assert (await engine.post("/reset_prefix_cache"))[0] == 200
    assert (await engine.complete(prompt))["usage"]["prompt_tokens_details"] is None


async def test_what_was_answered_is_cached_too(engine: Engine) -> None:
    prompt = list(range(40))
    reply = await engine.complete(prompt, max_tokens=40, return_token_ids=True)
    turn = prompt + reply["choices"][0]["token_ids"] + [1, 2, 3]
    assert (await engine.complete(turn))["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}


async def test_a_stream_says_the_same_in_pieces(engine: Engine) -> None:
    whole = await engine.complete("Once", max_tokens=10, n=2)
    chunks = await engine.stream(
        prompt="Once", max_tokens=10, n=2, stream_options={"include_usage": True}
    )
    *parts, last = chunks
    for choice in whole["choices"]:
        mine = [c for part in parts for c in part["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine] == [None] * 9 + ["length"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 20
    assert all("usage" not in part for part in parts)
    assert whole["choices"][0]["text"] != whole["choices"][1]["text"]


async def test_a_chat_is_what_the_template_makes_of_it(engine: Engine) -> None:
    client = openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0)
    async with client:
        messages: Any = [{"role": "user", "content": "Hi"}]
        whole = await client.chat.completions.create(
            model=MODEL, messages=messages, max_completion_tokens=12, logprobs=True, top_logprobs=2
        )
        parts = [
            part
            async for part in await client.chat.completions.create(
                model=MODEL, messages=messages, max_completion_tokens=12, stream=True
            )
        ]
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    plain = await engine.complete(rendered, max_tokens=12)
    text = whole.choices[0].message.content
    assert text == plain["choices"][0]["text"]
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text
    found = whole.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert [len(token.top_logprobs) for token in found.content] == [2] * 12


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_ends_before_its_stop(engine: Engine, stream: bool) -> None:
    text = (await engine.complete("Say", max_tokens=40))["choices"][0]["text"]
    stop = text[20:23]
    asked: dict[str, Any] = {"prompt": "Say", "max_tokens": 40, "stop": ["never said", stop]}
    if stream:
        chunks = await engine.stream(**asked)
        said = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        end = chunks[-1]["choices"][0]
    else:
        end = (await engine.complete(**asked))["choices"][0]
        said = end["text"]
    assert said == text[: text.index(stop)]
    assert (end["finish_reason"], end["stop_reason"]) == ("stop", stop)


async def test_several_prompts_are_several_choices(engine: Engine) -> None:
    prompts = ["One", "Two"]
    reply = await engine.complete(prompts, max_tokens=5)
    alone = [(await engine.complete(p, max_tokens=5))["choices"][0]["text"] for p in prompts]
    assert [choice["text"] for choice in reply["choices"]] == alone
    assert (await engine.complete("One", echo=True))["choices"][0]["text"].startswith("One")


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"prompt": "x", "model": "another"}, 404, "NotFoundError"),
        ({"prompt": ""}, 400, "BadRequestError"),
        ({"prompt": [1, 100_000]}, 400, "BadRequestError"),
        ({"prompt": [1, "x"]}, 400, "BadRequestError"),
        ({"prompt": "x", "max_tokens": 100_000}, 400, "BadRequestError"),
        ({"prompt": "x" * 3000}, 400, "BadRequestError"),
        ({"prompt": "x", "n": 0}, 400, "BadRequestError"),
        ([], 400, "BadRequestError"),
    ],
)
async def test_errors_have_vllms_shape(engine: Engine, body: Any, status: int, kind: str) -> None:
    async with engine.http.post(f"{engine.url}/v1/completions", json=body) as reply:
        error = (await reply.json())["error"]
    assert (reply.status, error["code"], error["type"]) == (status, status, kind)
    assert error["message"]


async def test_an_unknown_path_is_not_found(engine: Engine) -> None:
    assert (await engine.post("/v1/nothing"))[0] == 404


async def test_an_answer_that_nobody_limits_ends_by_itself(engine: Engine) -> None:
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    _, short = await engine.post("/v1/chat/completions", **asked, max_tokens=1)
    room = 2048 - short["usage"]["prompt_tokens"]
    for limit, expected in ((None, OWN_TOKENS), (room, OWN_TOKENS), (room - 1, room - 1)):
        status, reply = await engine.post("/v1/chat/completions", **asked, max_tokens=limit)
        assert (status, reply["usage"]["completion_tokens"]) == (200, expected)


async def test_what_is_there_and_how_it_is(engine: Engine) -> None:
    async with engine.http.get(f"{engine.url}/v1/models") as reply:
        (card,) = (await reply.json())["data"]
    assert (card["id"], card["max_model_len"]) == (MODEL, 2048)
    async with engine.http.get(f"{engine.url}/health") as reply:
        assert reply.status == 200
    _, found = await engine.post("/tokenize", prompt="abc")
    assert (found["count"], found["max_model_len"]) == (3, 2048)
    assert (await engine.post("/detokenize", tokens=found["tokens"]))[1] == {"prompt": "abc"}
    await engine.complete(list(range(40)))
    async with engine.http.get(f"{engine.url}/metrics") as reply:
        metrics = await reply.read()
    assert load_in(metrics).num_waiting == 0
    for name in (
        b"vllm:num_requests_running",
        b"vllm:kv_cache_usage_perc",
        b"vllm:prefix_cache_hits_total",
        b'vllm:request_success_total{engine="0",finished_reason="length"',
        b"vllm:time_to_first_token_seconds_count",
        b"timing:steps_total{",
        b"timing:late_step_seconds_total{",
    ):
        assert name in metrics


async def test_a_chat_is_rendered_to_what_is_computed_on(engine: Engine) -> None:
    messages = [{"role": "user", "content": "abc"}]
    status, found = await engine.post(
        "/v1/chat/completions/render", messages=messages, max_tokens=7
    )
    _, tokenized = await engine.post("/tokenize", messages=messages)
    assert (status, found["token_ids"]) == (200, tokenized["tokens"])
    assert (found["model"], found["sampling_params"]) == (MODEL, {"max_tokens": 7})


async def test_whoever_leaves_frees_the_batch(checkpoint: Path, tmp_path: Path) -> None:
    plan = write_plan(tmp_path)
    host, urls = await started(settings(plan, checkpoint, "e0", time_scale=1.0))
    scheduler = host.servers["e0"].instance.scheduler
    try:
        async with aiohttp.ClientSession() as http:
            engine = Engine(host, urls["e0"], http)
            asked = [
                asyncio.create_task(engine.complete("x" * 500, max_tokens=1500)) for _ in range(6)
            ]
            await until(lambda: scheduler.num_running and scheduler.num_waiting)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            await until(lambda: not (scheduler.num_running or scheduler.num_waiting))
            assert scheduler.kv_used_bytes == 0
    finally:
        await host.close()


async def test_the_name_has_to_say_that_nothing_is_computed(
    checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="computes nothing"):
        InstanceHost(settings(write_plan(tmp_path), checkpoint, "e0", model="tiny"))


async def test_kv_events_are_numbered_and_sent_again(checkpoint: Path, tmp_path: Path) -> None:
    zmq = pytest.importorskip("zmq", reason="pyzmq is not installed here")
    from zmq.asyncio import Context

    pub, replay = f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"
    made = settings(write_plan(tmp_path), checkpoint, "e0", kv_events={"e0": (pub, replay)})
    host, urls = await started(made)
    context: Any = Context()
    asker = context.socket(zmq.DEALER)
    try:
        async with aiohttp.ClientSession() as http:
            engine = Engine(host, urls["e0"], http)
            await engine.complete(list(range(100)), cache_salt="salt", max_tokens=1)
            await engine.post("/reset_prefix_cache")
        asker.connect(replay)
        await asker.send_multipart([b"", (0).to_bytes(8, "big")])
        batches = []
        while True:
            _, _, seq, payload = await asker.recv_multipart()
            if seq == (-1).to_bytes(8, "big", signed=True):
                break
            batches.append((int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload)))
    finally:
        asker.close(linger=0)
        context.destroy(linger=0)
        await host.close()
    assert [seq for seq, _ in batches] == list(range(len(batches)))
    events = [event for _, (_, found, _) in batches for event in found]
    assert events[0]["type"] == "BlockStored"
    assert events[0]["extra_keys"][0] == ["salt"]
    assert {event["group_idx"] for event in events[:-1]} == {0, 1}
    stored = sum(len(event["block_hashes"]) for event in events[:-1] if event["group_idx"] == 0)
    assert stored == 6
    assert events[-1] == {"type": "AllBlocksCleared"}


@pytest.mark.parametrize("sent", [b"GET /nowhere HTTP/1.1\r\nHost: x", b"G\x00T / HTTP/1.1"])
async def test_its_answers_name_no_software(engine: Engine, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(engine.url.rpartition(":")[2]))
    writer.write(sent + b"\r\nConnection: close\r\n\r\n")
    answer = (await reader.read()).lower()
    writer.close()
    assert b"server: prfaas\r\n" in answer
    for word in (b"python", b"aiohttp", b"b'"):
        assert word not in answer


TEMPLATES = (
    None,
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'tool' %}{% continue %}"
    "{% endif %}\n  {% if message.role == 'developer' %}{{ raise_exception('no') }}{% endif %}"
    "<{{ message.role }}>{{ message.content | trim }}</>{{ eos_token }}\n{% endfor %}"
    "{{ tools | tojson }}{{ enable_thinking }}{{ documents }}",
)


@pytest.mark.parametrize("template", TEMPLATES, ids=["own", "other"])
async def test_a_template_is_rendered_as_the_gateway_does(
    checkpoint: Path, tmp_path: Path, template: str | None
) -> None:
    """With `transformers`, which is not imported here. A gateway has each engine that becomes ready
    render these chats; of one that differs it would ask the tokens of every chat."""
    from transformers import AutoTokenizer

    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    if template is not None:
        (model / "chat_template.jinja").write_text(template)
    vocabulary = Vocabulary(str(model))
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(model))
    num_texts = 0
    for chat in compared_chats("timing"):
        variables = template_variables(chat.body)
        try:
            ours = await vocabulary.render(chat.body | {"chat_template_kwargs": variables})
        except RequestError:
            ours = None
        try:
            theirs = renderer.render(chat)
        except RequestError:
            theirs = None
        assert ours == theirs
        num_texts += ours is not None
    assert num_texts > 5


def test_a_model_without_a_length_of_its_own_is_read(checkpoint: Path, tmp_path: Path) -> None:
    """`transformers` writes 10^30 for it."""
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    settings = model / "tokenizer_config.json"
    known = json.loads(settings.read_bytes()) | {"model_max_length": int(1e30)}
    settings.write_text(json.dumps(known))
    assert Vocabulary(str(model)).size > 0
