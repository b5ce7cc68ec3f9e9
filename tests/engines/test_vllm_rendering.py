"""Chats rendered by the gateway and by vLLM's own code, with templates of each kind.

Where the chats that a gateway compares at start are equal, all others have to be.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prfaas.errors import RequestError
from prfaas.gateway.openai.requests import Api, parse_request
from prfaas.gateway.tokenization.chat_renderer import REFUSED, ChatRenderer, compared_chats
from tests.gateway.conftest import make_checkpoint

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]
OWN = {
    "plain": "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] }}{% endfor %}",
    "parts": "{% for m in messages %}<{{ m.role }}>{% for c in m.content %}{{ c.text }}|"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}",
    "either": "{% for m in messages %}{% if m.content is string %}S{{ m.content }}{% else %}"
    "{% for c in m['content'] %}{% if c.type == 'text' %}P{{ c['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}",
    "tools": "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m.role }}:"
    "{{ m.content }}{% for t in m.tool_calls or [] %}{{ t.function.arguments | tojson }}"
    "{{ t.function.name }}{% endfor %}{{ m.reasoning_content or '' }}{% endfor %}",
    "developer": "{% for m in messages %}{% if m.role == 'developer' %}D{% endif %}"
    "{{ m.content }}{% endfor %}",
    "strict": "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system first') }}{% endif %}{{ m.role }}{{ m.content }}{% endfor %}",
    "thinking": "{{ enable_thinking }}{{ reasoning_effort }}{% for m in messages %}{{ m.content }}"
    "{% endfor %}{% if documents %}{{ documents[0].text }}{% endif %}",
}
TEXTS = ["", "a", " a\n", "two\nlines", "<|im_end|>", "é😀", "{{ x }}"]
CALLS = ['{"a": 1e400, "b": NaN}', "{}", "", "[1]", "{", '{"é": "\\ud83d\\ude00"}', '{"x": 1.0}']


def chats() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for text in TEXTS:
        found.append({"messages": [{"role": "user", "content": text}]})
        found.append({"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]})
        parts = [{"type": "text", "text": t} for t in ("x", text, "", "y")]
        for role in ("system", "user", "assistant", "tool", "developer"):
            extra = {"tool_call_id": "c"} if role == "tool" else {}
            message = {"role": role, "content": parts, **extra}
            found.append({"messages": [message, {"role": "user", "content": "q"}]})
    for call in CALLS:
        function = {"name": "f", "arguments": call}
        calls = [{"id": "c", "type": "function", "function": function}]
        found.append(
            {
                "messages": [
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": None, "tool_calls": calls},
                    {"role": "tool", "tool_call_id": "c", "content": "r"},
                ]
            }
        )
    user = {"role": "user", "content": "q"}
    reasons = {"role": "assistant", "reasoning": "why", "content": "so"}
    found += [
        {"messages": [user, reasons, user]},
        {"messages": [user, {"role": "developer", "content": "d"}, user]},
        {
            "messages": [
                {"role": "system", "content": "s"},
                user,
                {"role": "developer", "content": "d"},
            ]
        },
        {"messages": [{"role": "system", "content": "x-anthropic-billing-header: 1\nkept"}, user]},
        {"messages": [{"role": "system", "content": "x-anthropic-billing-header: 1"}, user]},
        {"messages": [user], "reasoning_effort": "low"},
        {"messages": [user], "reasoning_effort": "none"},
        {"messages": [user], "documents": [{"title": "t", "text": "d"}]},
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
                user,
            ]
        },
        {"messages": [{"role": "user", "content": "n", "name": "ann"}]},
    ]
    return found


@cache
def tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    path = Path(folder)
    path.mkdir(exist_ok=True)
    return AutoTokenizer.from_pretrained(make_checkpoint(path))


def templates() -> dict[str, str]:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "transformers_utils" / "chat_templates"
    return OWN | {file.stem: file.read_text() for file in sorted(folder.glob("*.jinja"))}


def of_vllm(tokenizer: Any, body: dict[str, Any]) -> str:
    """Text of a chat as vLLM's server renders it."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers.chat_utils import parse_chat_messages
    from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

    config: Any = SimpleNamespace(
        enable_prompt_embeds=False,
        multimodal_config=None,
        hf_config=None,
        model="m",
        trust_remote_code=False,
        tokenizer_revision=None,
        tokenizer="m",
        revision=None,
        code_revision=None,
    )
    request = ChatCompletionRequest(**body)
    tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
    form = resolve_chat_template_content_format(
        tokenizer.chat_template, tools, "auto", tokenizer, model_config=config
    )
    try:
        talk, _, _ = parse_chat_messages(request.messages, config, content_format=form)
        kwargs = request.build_chat_params(
            tokenizer.chat_template, "auto"
        ).get_apply_chat_template_kwargs()
        kwargs |= {"tools": tools, "tokenize": False}
        return str(safe_apply_chat_template(config, tokenizer, talk, **kwargs))
    except Exception:
        return REFUSED


def of_gateway(renderer: ChatRenderer, body: dict[str, Any]) -> str:
    try:
        return renderer.render(parse_request(body, Api.CHAT, "m", 0))
    except RequestError:
        return REFUSED


@pytest.mark.parametrize("name", sorted(templates()))
def test_chats_are_equal_where_those_that_are_compared_are(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    known = tokenizer(str(tmp_path_factory.getbasetemp() / "model"))
    known.chat_template = templates()[name]
    renderer = ChatRenderer(known)
    bodies = [each.body | {"model": "m"} for each in compared_chats("m")]
    theirs = [of_vllm(known, body) for body in bodies]
    for takes_parts in (False, True):
        renderer.takes_parts = takes_parts
        if [of_gateway(renderer, body) for body in bodies] == theirs:
            break
    else:
        # An engine renders these; of the templates here none is left to it.
        pytest.fail(f"the engine would be asked for every chat of {name}")
    for chat in chats():
        body = {"model": "m", **chat}
        assert of_gateway(renderer, body) == of_vllm(known, body), chat
