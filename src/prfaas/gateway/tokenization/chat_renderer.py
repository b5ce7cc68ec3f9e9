"""Chats as text, by the model's chat template; an engine renders those that it would make others
of."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
from jinja2 import TemplateSyntaxError

from prfaas.config.clusters import ClusterRole
from prfaas.errors import ConfigError, EngineError, RequestError
from prfaas.gateway.engines.engine import Engine
from prfaas.gateway.engines.engine_client import Engines
from prfaas.gateway.http.errors import UnavailableError
from prfaas.gateway.http.json_codec import JsonObject, as_object, from_json
from prfaas.gateway.openai.fields import bad
from prfaas.gateway.openai.messages import for_template
from prfaas.gateway.openai.requests import Api, ClientRequest, parse_request
from prfaas.logs import log_event
from prfaas.tasks import cancel_all

_log = logging.getLogger(__name__)


NOT_THE_CLIENTS = (ImportError, MemoryError, OSError, TemplateSyntaxError)
"""Failures of a rendering that no message causes: they are answered with 500."""
_RESERVED_NAMES = frozenset(
    {
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "messages",
    }
)


class ChatRenderer:
    """Renders chats in one of two forms of their contents.

    Args:
        tokenizer: Of the model, with its chat template.

    Attributes:
        takes_parts: True for a template that goes through the parts of a content, False for one
            that prints it; `EngineRendering` finds out which.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.takes_parts = False

    def render(self, client: ClientRequest) -> str:
        """Render the messages of a request; RequestError (400) if the template refuses them."""
        body, template = client.body, self._tokenizer.chat_template
        variables = template_variables(body)
        knows_developer = isinstance(template, str) and (
            '"developer"' in template or "'developer'" in template
        )
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    for_template(
                        client.messages,
                        knows_developer=knows_developer,
                        takes_parts=self.takes_parts,
                    ),
                    tools=client.tools or None,
                    documents=body.get("documents"),
                    add_generation_prompt=body.get("add_generation_prompt") is not False,
                    continue_final_message=bool(body.get("continue_final_message")),
                    tokenize=False,
                    **variables,
                )
            )
        except NOT_THE_CLIENTS:
            raise
        except Exception as error:
            # A template is the model's own program: it refuses input by raising what it likes.
            raise bad(f"the chat template refuses the messages: {error}", "messages") from None


def template_variables(body: JsonObject) -> JsonObject:
    """Return the variables of a template that a body sets.

    Raises:
        RequestError: 400, it sets one that the gateway sets itself.
    """
    variables: JsonObject = dict(body.get("chat_template_kwargs") or {})
    reserved = sorted(_RESERVED_NAMES & variables.keys())
    if reserved:
        raise bad(
            f"chat_template_kwargs must not set {', '.join(reserved)}", "chat_template_kwargs"
        )
    effort = body.get("reasoning_effort")
    if effort is not None:
        variables.setdefault("enable_thinking", effort != "none")
        variables["reasoning_effort"] = effort
    return variables


def try_template(tokenizer: Any) -> str:
    """Render three messages, so that what is missing is found now and not by the first client.

    Returns:
        The text; empty if the template fails or is missing.

    Raises:
        ConfigError: A package that templates need is not installed.
    """
    if tokenizer.chat_template is None:
        _log.warning("the model has no chat template: /v1/chat/completions answers 400")
        return ""
    roles = ("user", "assistant", "user")
    messages: list[JsonObject] = [{"role": role, "content": "."} for role in roles]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except ImportError as error:
        said = f"chats cannot be rendered: {error}; install it beside prfaas"
        raise ConfigError(said) from None
    except Exception as error:
        _log.warning("the model's chat template fails with messages of text: %s", error)
        return ""


REFUSED = "refused"
_REFUSALS = (400, 422)
_SAME = (
    *("messages", "tools", "add_generation_prompt", "continue_final_message"),
    "add_special_tokens",
)
RETRY_S = 5.0
"""Pause before an engine that did not answer is compared again, seconds."""
_CALL = {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1.5}'}}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_TALK: list[JsonObject] = [
    {"role": "system", "content": " Be brief.\n"},
    {"role": "user", "content": "One\ntwo "},
    {"role": "assistant", "content": "Three."},
    {"role": "user", "content": "Four?"},
]
_PARTS: list[JsonObject] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
_CHATS: tuple[JsonObject, ...] = (
    {"messages": [{"role": "user", "content": "x"}]},
    {"messages": _TALK},
    {"messages": _TALK[1:], "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": _TALK[:3], "add_generation_prompt": False},
    {"messages": _TALK[:3], "add_generation_prompt": False, "continue_final_message": True},
    {"messages": [{"role": "user", "content": _PARTS}]},
    {"messages": [{"role": "system", "content": _PARTS}, {"role": "user", "content": ""}]},
    {"messages": [{"role": "developer", "content": "d"}, *_TALK[1:]]},
    {"messages": _TALK, "tools": [_TOOL]},
    {
        "messages": [
            _TALK[1],
            {"role": "assistant", "reasoning": "hm", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call-1", "content": _PARTS},
            {"role": "assistant", "reasoning": "so", "content": "5"},
            _TALK[3],
        ],
        "tools": [_TOOL],
    },
)


class EngineRendering:
    """Makes the token ids of chats where the gateway's own would differ from the engines'.

    An engine can be started with a template, a format of contents, variables or a renderer of its
    own, and none of it shows from outside. Therefore each PD engine that becomes ready renders a
    few chats, and until it has, or if its ids differ, it renders every chat.

    Args:
        model: Name of the served model.
        encode: Token ids of a rendered text; True adds the tokenizer's special tokens.
    """

    def __init__(
        self,
        engines: Engines,
        model: str,
        renderer: ChatRenderer,
        encode: Callable[[str, bool], list[int]],
    ) -> None:
        self._engines, self._model = engines, model
        self._renderer, self._encode = renderer, encode
        self._agrees: dict[str, bool] = {}
        """Results by engine; without one while it is compared."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._followed: dict[str, Engine] = {}

    def engine_changed(self, engine: Engine) -> None:
        """An engine has become ready, or is not ready any more."""
        is_known = self._followed.get(engine.name) is engine
        if engine.role is not ClusterRole.PD or engine.is_ready == is_known:
            return
        if (task := self._tasks.pop(engine.name, None)) is not None:
            task.cancel()
        self._agrees.pop(engine.name, None)
        self._followed.pop(engine.name, None)
        if engine.is_ready:
            self._followed[engine.name] = engine
            self._tasks[engine.name] = asyncio.create_task(self._follow(engine))

    async def close(self) -> None:
        """Stop."""
        await cancel_all(self._tasks.values())

    @property
    def takes_parts(self) -> bool:
        """See `ChatRenderer`."""
        return self._renderer.takes_parts

    @property
    def is_own(self) -> bool:
        """Return True if the gateway renders chats itself."""
        engine = self._engines.choose(ClusterRole.PD)
        return engine is None or self._agrees.get(engine.name, False)

    async def ids(self, client: ClientRequest) -> list[int] | None:
        """Return the token ids of a chat as an engine makes them; None if the gateway's are equal.

        Raises:
            RequestError: 400, the engine's template refuses the messages.
            UnavailableError: No PD engine is ready, or it does not answer.
        """
        if self.is_own or (engine := self._engines.choose(ClusterRole.PD)) is None:
            return None
        try:
            return await self._tokenized(engine, client)
        except (EngineError, aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise UnavailableError(
                f"the chat cannot be rendered: an engine fails at it ({type(error).__name__})"
            ) from None

    async def _follow(self, engine: Engine) -> None:
        while True:
            agrees = await self._compare(engine)
            if agrees is not None:
                self._agrees[engine.name] = agrees
                return
            await asyncio.sleep(RETRY_S)

    async def _compare(self, engine: Engine) -> bool | None:
        """Compare once; None if the engine did not answer."""
        chats = list(compared_chats(self._model))
        try:
            theirs = [await self._rendered(engine, chat) for chat in chats]
        except (EngineError, aiohttp.ClientError, TimeoutError, ValueError):
            return None
        if theirs[0] is None:
            log_event(_log, logging.INFO, "rendering_not_compared", engine=engine.name)
            return True
        for _ in range(2):
            ours = await asyncio.to_thread(lambda: [self._own(chat) for chat in chats])
            if ours == theirs:
                return True
            # The form of contents is one for all engines: it is not changed once one agrees.
            if any(self._agrees.values()):
                break
            self._renderer.takes_parts = not self._renderer.takes_parts
        num_differing = sum(own != other for own, other in zip(ours, theirs, strict=True))
        fields = {"engine": engine.name, "differing": num_differing, "of": len(chats)}
        log_event(_log, logging.WARNING, "rendering_differs", **fields)
        return False

    def _own(self, client: ClientRequest) -> list[int] | str:
        try:
            text = self._renderer.render(client)
        except RequestError:
            return REFUSED
        return self._encode(text, bool(client.body.get("add_special_tokens")))

    async def _rendered(self, engine: Engine, client: ClientRequest) -> list[int] | str | None:
        """Return the ids, "refused", or None from an engine that has no such endpoint."""
        try:
            return await self._tokenized(engine, client)
        except RequestError:
            return REFUSED

    async def _tokenized(self, engine: Engine, client: ClientRequest) -> list[int] | None:
        given = {key: client.body.get(key) for key in _SAME}
        body: JsonObject = {key: value for key, value in given.items() if value is not None}
        variables = template_variables(client.body)
        if (documents := client.body.get("documents")) is not None:
            variables["documents"] = documents
        body |= {"model": self._model, "chat_template_kwargs": variables}
        status, answer = await self._engines.tokenize(engine, body)
        if status in (404, 405):
            self._agrees[engine.name] = True
            return None
        found = as_object(from_json(answer)) if status in (200, *_REFUSALS) else {}
        if status in _REFUSALS:
            why = as_object(found.get("error")).get("message", "")
            raise bad(f"the chat template refuses the messages: {why}", "messages")
        ids = found.get("tokens")
        if not isinstance(ids, list) or not all(type(each) is int for each in ids):
            raise EngineError(f"/tokenize answers {status}")
        return ids


def compared_chats(model: str) -> Iterator[ClientRequest]:
    """Chats that are compared: roles, parts, tools, reasoning, and what ends a prompt."""
    return (parse_request({"model": model, **chat}, Api.CHAT, model, 0) for chat in _CHATS)
