"""Chats of engines that render otherwise than the gateway: their ids are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from transformers import AutoTokenizer

from prfaas.config.chat_templates import ChatTemplate
from prfaas.gateway.engines.engine import Engine
from prfaas.gateway.openai.requests import Api, parse_request
from prfaas.gateway.tokenization.chat_renderer import ChatRenderer
from tests.gateway.conftest import World, until

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


class Rendering:
    """`/tokenize` of an engine that was started with another template."""

    def __init__(self, checkpoint: Path, template: str | None = None, status: int = 200) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
        if template is not None:
            self.tokenizer.chat_template = template
        self.renderer, self.status = ChatRenderer(self.tokenizer), status
        self.num_asked = 0

    def ids(self, body: dict[str, Any]) -> list[int]:
        text = self.renderer.render(parse_request(body, Api.CHAT, "tiny", 0))
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    async def __call__(self, request: web.Request) -> web.Response:
        self.num_asked += 1
        if self.status != 200:
            error = {"message": "no such role"}
            return web.json_response({"error": error}, status=self.status)
        try:
            return web.json_response({"tokens": self.ids(await request.json())})
        except Exception as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)


async def render_with(world: World, rendering: Rendering) -> None:
    """Let the decode engine become ready again, with an endpoint that renders."""
    world.decode.on_tokenize = rendering
    engine = world.gateway.engines.by_name["decode"]
    world.decode.healthy = False
    await until(lambda: not engine.is_ready)
    world.decode.healthy = True
    await until(lambda: engine.is_ready)


def compared(world: World) -> bool | None:
    found: bool | None = world.gateway.rendering._agrees.get("decode")
    return found


async def sent(world: World) -> list[int]:
    status, reply = await world.post(BODY, CHAT)
    assert status == 200, reply
    ids: list[int] = world.decode.calls[-1].body["prompt"]
    return ids


async def test_equal_engines_are_not_asked(world: World, checkpoint: Path) -> None:
    rendering = Rendering(checkpoint)
    await render_with(world, rendering)
    await until(lambda: compared(world) is True)
    num_asked = rendering.num_asked
    assert await sent(world) == rendering.ids(BODY)
    assert rendering.num_asked == num_asked


async def test_another_template_of_the_engine_is_used(world: World, checkpoint: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    rendering = Rendering(checkpoint, template)
    await render_with(world, rendering)
    await until(lambda: compared(world) is False)
    assert await sent(world) == rendering.ids(BODY)
    assert world.gateway._prompts.renderer.takes_parts is False
    # The engine that has another template is replaced by one that has the model's.
    await render_with(world, own := Rendering(checkpoint))
    await until(lambda: compared(world) is True)
    assert await sent(world) == own.ids(BODY) != rendering.ids(BODY)


async def test_a_template_of_parts_is_found_out(world: World, checkpoint: Path) -> None:
    template = (
        "{% for m in messages %}{% for c in m.content %}({{ c.text }}){% endfor %}{% endfor %}"
    )
    rendering = Rendering(checkpoint, template)
    rendering.renderer.takes_parts = True
    world.gateway._prompts._tokenizer.template = ChatTemplate(template, {})
    await render_with(world, rendering)
    await until(lambda: compared(world) is True)
    num_asked = rendering.num_asked
    assert await sent(world) == rendering.ids(BODY)
    assert rendering.num_asked == num_asked


@pytest.mark.parametrize(("status", "expected"), [(400, 400), (500, 503), (302, 503)])
async def test_what_the_engine_answers_otherwise(
    world: World, checkpoint: Path, status: int, expected: int
) -> None:
    await render_with(world, Rendering(checkpoint, status=status))
    found, reply = await world.post(BODY, CHAT)
    assert found == expected
    assert ("no such role" in reply["error"]["message"]) == (status == 400)


async def test_an_engine_without_the_endpoint_cannot_be_compared(world: World) -> None:
    await until(lambda: compared(world) is True)
    ids = await sent(world)
    assert ids


async def test_results_end_with_their_engine(world: World, checkpoint: Path) -> None:
    rendering = world.gateway.rendering
    engine = world.gateway.engines.by_name["decode"]
    await until(lambda: compared(world) is True)
    engine.is_ready, engine.why_down = False, "it was told so"
    rendering.engine_changed(engine)
    assert compared(world) is None
    assert "decode" not in rendering._tasks
    twin = Engine("decode", engine.url, engine.role, engine.pool, is_ready=True)
    rendering.engine_changed(twin)
    assert "decode" in rendering._tasks
