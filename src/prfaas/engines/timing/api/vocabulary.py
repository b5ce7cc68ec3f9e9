"""The model's tokenizer, and the tokens that answers are drawn from."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prfaas.config.chat_templates import ChatTemplate
from prfaas.errors import ConfigError, RequestError
from prfaas.limited_files import read_json

SPOKEN_MAX = 2048
LOOKED_AT_MAX = 20_000


class Vocabulary:
    """Text to tokens and back; ConfigError if there is no tokenizer.

    Args:
        path: Checkpoint directory; of a checkpoint, only tokenizer and `config.json` are read.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._tokenizer = _load(path)
        self.size = max(_vocab_size(path), self._tokenizer.get_vocab_size())
        self.texts = _spoken(self._tokenizer)
        self.spoken = sorted(self.texts)
        if not self.spoken:
            raise ConfigError(f"the tokenizer at {path} knows no token of plain letters")
        self._template: Any = None
        self._plain = _plain_template(Path(path))
        self._loading = threading.Lock()

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of a text, special tokens of the tokenizer added or not."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: list[int]) -> str:
        """Text of token ids."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text

    async def render(self, body: Mapping[str, Any]) -> str:
        """Messages by the model's chat template; RequestError if the template refuses them."""
        return await asyncio.to_thread(self._render, body)

    def _render(self, body: Mapping[str, Any]) -> str:
        messages, continues = body["messages"], bool(body.get("continue_final_message"))
        try:
            arguments = {
                "tools": [_with_defaults(tool) for tool in body.get("tools") or ()] or None,
                "documents": None,
                "add_generation_prompt": body.get("add_generation_prompt") is not False,
                **(body.get("chat_template_kwargs") or {}),
            }
            if self._plain is not None:
                system = "developer" if "developer" in self._plain.source else "system"
                said = [_as_text(message, system) for message in messages]
                render = self._plain.render_open if continues else self._plain.render
                return render(said, **arguments)
            text: str = self._loaded().apply_chat_template(
                messages, continue_final_message=continues, tokenize=False, **arguments
            )
        except (ImportError, MemoryError, OSError):
            raise  # No message causes them.
        except Exception as error:
            # A template is a program of the model: it can raise any error.
            raise RequestError(f"the chat template refuses the messages: {error}") from None
        return text

    def _loaded(self) -> Any:
        """The chat template's tokenizer. Two threads cannot import `transformers` at once."""
        with self._loading:
            if self._template is None:
                from transformers import AutoTokenizer

                self._template = AutoTokenizer.from_pretrained(self._path)
            return self._template


def _plain_template(path: Path) -> ChatTemplate | None:
    """The chat template of a checkpoint directory; None if it needs `transformers`."""
    from jinja2 import TemplateSyntaxError

    settings, file = path / "tokenizer_config.json", path / "chat_template.jinja"
    if not settings.exists() or not (path / "tokenizer.json").exists():
        return None
    # Without a limit of its own, a model's length is 10^30 there.
    known = read_json(settings, number_max=math.inf)
    source = file.read_text(encoding="utf-8") if file.exists() else known.get("chat_template")
    if not isinstance(source, str):
        return None

    special = {
        name: text["content"] if isinstance(text, dict) else text
        for name, text in known.items()
        if name.endswith("_token") and isinstance(text, str | dict)
    }
    try:
        return ChatTemplate(source, special)
    except TemplateSyntaxError:  # A tag of `transformers`' own.
        return None


def _as_text(message: dict[str, Any], developer: str) -> dict[str, Any]:
    """A message in the form that vLLM gives to templates which print contents: a gateway renders
    every chat itself only if its engines agree."""
    parts = message.get("content") or ""
    role = developer if message.get("role") == "developer" else message.get("role")
    if isinstance(parts, list):
        texts = [part["text"] if isinstance(part, dict) else part for part in parts]
        parts = "\n".join(filter(None, texts))
    return {**message, "role": role, "content": parts}


def _with_defaults(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool with the keys that vLLM adds, in its order: templates print them."""
    given = tool["function"]
    return {**tool, "function": {"name": None, "description": None, "parameters": None, **given}}


def _load(path: str) -> Any:
    from tokenizers import Tokenizer

    file = Path(path) / "tokenizer.json"
    if file.exists():
        return Tokenizer.from_file(str(file))
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path).backend_tokenizer
    except (ImportError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"no tokenizer for model.path {path!r}: {reason}") from None


def _vocab_size(path: str) -> int:
    file = Path(path) / "config.json"
    if not file.exists():
        return 0
    config = read_json(file)
    return int(config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 0)


def _spoken(tokenizer: Any) -> dict[int, str]:
    """Tokens whose text is letters, digits and spaces in any context."""
    texts: dict[int, str] = {}
    for token in range(min(tokenizer.get_vocab_size(), LOOKED_AT_MAX)):
        text = tokenizer.decode([token])
        if text and text.isascii() and all(char.isalnum() or char in " ,." for char in text):
            texts[token] = text
            if len(texts) == SPOKEN_MAX:
                break
    return texts
