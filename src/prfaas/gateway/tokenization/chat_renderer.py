"""Chats as text, by the model's chat template."""

from __future__ import annotations

import logging
from typing import Any

from jinja2 import TemplateSyntaxError

from prfaas.errors import ConfigError
from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.openai.messages import for_template
from prfaas.gateway.openai.requests import ClientRequest
from prfaas.gateway.openai.validation import bad

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
        """Render the messages of a request.

        Raises:
            RequestError: 400, the template refuses them.
        """
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


def try_template(tokenizer: Any) -> None:
    """Render one message, so that what is missing is found now and not by the first client.

    Raises:
        ConfigError: A package that templates need is not installed.
    """
    if tokenizer.chat_template is None:
        _log.warning("the model has no chat template: /v1/chat/completions answers 400")
        return
    message: JsonObject = {"role": "user", "content": "."}
    try:
        tokenizer.apply_chat_template([message], tokenize=False)
    except ImportError as error:
        said = f"chats cannot be rendered: {error}; install it beside prfaas"
        raise ConfigError(said) from None
    except Exception as error:
        _log.warning("the model's chat template fails with one message of a user: %s", error)
