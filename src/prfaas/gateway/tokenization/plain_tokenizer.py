"""The tokenizer of a checkpoint without `transformers`, whose import takes 1.3 s of CPU time.

Only where `transformers` takes `tokenizer.json` as it is: of a class that adds nothing, and with
settings that are known to change nothing. A test compares both by all of its model types.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from prfaas.config.chat_templates import ChatTemplate, Messages
from prfaas.errors import ConfigError
from prfaas.gateway.http.json_codec import JsonObject, as_object
from prfaas.limited_files import read_json

_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_OTHER_CLASSES = ("hyperclovax", "mi", "pixtral", "qwen", "voxtral")
"""Begins of model types for which `transformers` takes, or mends, another class."""
_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
NAMES = tuple(f"{name}_token" for name in _NAMED)
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_WITHOUT_EFFECT = frozenset(
    {
        *("backend", "chat_template", "is_local", "model_input_names", "model_max_length"),
        *("name_or_path", "padding_side", "tokenizer_class", "added_tokens_decoder"),
        *NAMES,
        *_LISTS,
    }
)
_NO_FILES = ("added_tokens.json", "additional_chat_templates", "special_tokens_map.json")
_FLAGS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")


class PlainTokenizer:
    """The part of a tokenizer of `transformers` that the gateway uses."""

    split_special_tokens = False

    def __init__(self, core: Any, template: ChatTemplate | None) -> None:
        self.backend_tokenizer = self._tokenizer = core
        self.template = template
        """Chat template; None without one."""

    @property
    def chat_template(self) -> str | None:
        """Source of the chat template."""
        return None if self.template is None else self.template.source

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def get_vocab(self) -> dict[str, int]:
        """Ids of all tokens."""
        vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return vocab

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: list[int]) -> str:
        """Text of token ids."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        """Tokens as the tokenizer writes them; None for ids that it does not have."""
        return [self._tokenizer.id_to_token(each) for each in ids]

    def apply_chat_template(
        self,
        messages: Messages,
        *,
        tools: list[JsonObject] | None = None,
        documents: list[JsonObject] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool,
        **variables: Any,
    ) -> str:
        """Text of a chat; ValueError without a template, and whatever the template raises."""
        if self.template is None:
            raise ValueError("the model's chat_template is not set")
        if tokenize or not messages:
            raise ValueError("a text of at least one message can be asked for")
        if not all(isinstance(each, dict) for each in documents or ()):
            raise TypeError("documents has to be a list of objects")
        variables |= {"tools": tools, "documents": documents}
        variables["add_generation_prompt"] = add_generation_prompt
        if continue_final_message:
            return self.template.render_open(messages, **variables)
        return self.template.render(messages, **variables)


def plain_tokenizer(path: Path) -> tuple[PlainTokenizer, JsonObject] | None:
    """The tokenizer of a checkpoint directory and its `config.json`; None if it takes
    `transformers` to read it."""
    try:
        # Without a limit of its own, a model's length is 10^30 there.
        known = as_object(read_json(path / "tokenizer_config.json", number_max=math.inf))
        config = as_object(read_json(path / "config.json", number_max=math.inf))
    except ConfigError:
        return None
    file, model_type = path / "tokenizer.json", str(config.get("model_type") or "")
    if (
        known.get("tokenizer_class") not in _CLASSES
        or not known.keys() <= _WITHOUT_EFFECT
        or not model_type
        or model_type.startswith(_OTHER_CLASSES)
        or not file.is_file()
        or any((path / name).exists() for name in _NO_FILES)
    ):
        return None
    from tokenizers import Tokenizer

    core = Tokenizer.from_file(str(file))
    source = path / "chat_template.jinja"
    said = source.read_text(encoding="utf-8") if source.is_file() else known.get("chat_template")
    if not _has_all(core, known) or not isinstance(said, str | None):
        return None
    special = {name: _text(known[name]) for name in NAMES if known.get(name) is not None}
    try:
        template = None if said is None else ChatTemplate(said, special)
    except TemplateSyntaxError:  # A tag of `transformers`' own, or its error to report.
        return None
    return PlainTokenizer(core, template), config


def _has_all(core: Any, known: JsonObject) -> bool:
    """Return True if a tokenizer has all special and added tokens of its settings."""
    has = core.get_added_tokens_decoder()
    special = {token.content for token in has.values() if token.special}
    named = [known[name] for name in NAMES if known.get(name) is not None]
    listed = [each for name in _LISTS for each in known.get(name) or ()]
    if not {_text(each) for each in (*named, *listed)} <= special:
        return False
    return all(
        (token := has.get(int(number))) is not None
        and all(getattr(token, flag) == wanted.get(flag, "") for flag in _FLAGS)
        for number, wanted in (known.get("added_tokens_decoder") or {}).items()
    )


def _text(token: object) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
