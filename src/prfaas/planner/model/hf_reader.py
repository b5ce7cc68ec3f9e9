"""Reading of the fields of a Hugging Face config; its class has defaults for those left out.

The data file of defaults is written by `tests/planner/hf_defaults.py` and compared with the
installed library by `tests/planner/test_hf_defaults.py`.

A config is accepted only if every field that is set was read, or is listed in
`data/harmless_fields.txt`, whatever the architecture. An unknown field is named in an error and not
ignored. `tests/planner/test_hf_zoo.py` checks the list against all causal models of `transformers`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from prfaas.errors import ConfigError

_NONE: Mapping[str, object] = MappingProxyType({})


def defaults_of(model_type: str) -> Mapping[str, object]:
    """Defaults of the fields that the planner reads, by name; empty for an unknown type."""
    found: Mapping[str, object] = _data()["defaults"].get(model_type, _NONE)
    return found


def text_type_of(model_type: object) -> str | None:
    """Model type of the text part of a multimodal type, where the part does not name it."""
    found: str | None = _data()["text"].get(model_type) if isinstance(model_type, str) else None
    return found


def layer_pattern(model_type: str) -> list[str]:
    """Layer types that the class gives to layers in turn, where the config does not list them."""
    found: list[str] = _data()["patterns"].get(model_type, [])
    return found


def is_encoder(model_type: str) -> bool:
    """Return True for types of encoders and of other models that generate no text."""
    return model_type in _data()["encoders"]


def is_decoder(model_type: str) -> bool:
    """Return True for types whose config class is known to be a decoder's."""
    return model_type in _data()["defaults"]


@cache
def _data() -> Any:
    file = resources.files("prfaas.planner").joinpath("data", "hf_defaults.json")
    return json.loads(file.read_text(encoding="utf-8"))


_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
BY_HAND = (
    "describe the cache by hand with kv_bytes_per_token and kv_state under [model] of the plan file"
)
"""Next step for a config that is not understood."""
_INTEGER_MAX = 2**48
_LAYERS_MAX = 4096
"""Layers of a config, far above those of any model: each is an entry of a list."""


class ConfigReader:
    """The text part of a config, read field by field.

    A field that the file leaves out has the default of its config class; null counts as given.

    Args:
        config: Parsed `config.json`.
        name: Where it came from, for messages.
    """

    def __init__(self, config: Mapping[str, object], name: str) -> None:
        self.name = name
        self._outer = config
        self._fields = _text_part(config)
        own, outer = self._fields.get("model_type"), config.get("model_type")
        nested = self._fields is not config
        self.model_type = str(own or (text_type_of(outer) if nested else None) or outer or "")
        """`model_type` of the text model, or "" when the file has none."""
        self._defaults = defaults_of(self.model_type)
        self._read: set[str] = set()
        self._sections: dict[str, ConfigReader] = {}

    def is_given(self, field: str) -> bool:
        """Return True if the file itself has a value for the field, other than an empty list."""
        return self._fields.get(field) not in (None, []) and self.has(field)

    def has(self, field: str) -> bool:
        """Return True if the field is present and not null."""
        return self._get(field) is not None

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that is there, as an integer.

        Raises:
            ConfigError: None is there and there is no default, or the value is no integer >= 0.
        """
        # A name that the file has comes before the default of another.
        for name in sorted(names, key=lambda name: self._fields.get(name) is None):
            value = self._get(name)
            if value is None:
                continue
            if isinstance(value, float) and value.is_integer():
                value = int(value)  # as some tools write whole numbers
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{self.name}: field {name} is {value!r}; expected an integer")
            if not 0 <= value <= _INTEGER_MAX:
                raise ConfigError(
                    f"{self.name}: field {name} is {value}; expected 0 to {_INTEGER_MAX:,}"
                )
            return value
        if default is None:
            raise ConfigError(
                f"{self.name}: none of the fields {', '.join(names)} is there; without it the KV "
                f"cache of model_type {self.model_type!r} cannot be computed; {BY_HAND}"
            )
        return default

    def positive(self, *names: str) -> int:
        """Like `integer`, for a count that cannot be 0; ConfigError if none is there, or the value
        is no integer >= 1."""
        value = self.integer(*names)
        if value == 0:
            raise ConfigError(f"{self.name}: field {names[0]} is 0; expected at least 1")
        return value

    def num_layers(self, default: int | None = None) -> int:
        """Number of layers; ConfigError if it is not there and has no default, or is too large."""
        found = self.integer(
            "num_hidden_layers", "n_layer", "num_layers", "n_layers", default=default
        )
        if found > _LAYERS_MAX:
            raise ConfigError(
                f"{self.name}: field num_hidden_layers is {found:,}; at most {_LAYERS_MAX:,}"
            )
        return found

    def integers(self, name: str) -> list[int]:
        """A list of integers; ConfigError if the field is missing or not a list of integers."""
        value = self._get(name)
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ConfigError(f"{self.name}: field {name} is {value!r}; expected a list")
        if not all(isinstance(item, int) for item in value):
            raise ConfigError(f"{self.name}: field {name} holds something other than integers")
        return [int(item) for item in value]

    def strings(self, name: str) -> list[str]:
        """A list of strings (or the characters of a string); ConfigError if the field is missing or
        neither a list nor a string."""
        value = self._get(name)
        if not isinstance(value, Sequence):
            raise ConfigError(f"{self.name}: field {name} is {value!r}; expected a list")
        return [str(item) for item in value]

    def text(self, *names: str) -> str | None:
        """The first of these fields that holds a string."""
        for name in names:
            value = self._get(name)
            if isinstance(value, str):
                return value
        return None

    def is_list(self, name: str) -> bool:
        """Return True if the field holds a list."""
        value = self._get(name)
        return isinstance(value, Sequence) and not isinstance(value, str)

    def is_set(self, name: str) -> bool:
        """Return True if a boolean field is present and true."""
        return bool(self._get(name))

    def section(self, name: str) -> ConfigReader:
        """A nested table, empty when it is not there."""
        if name not in self._sections:
            value = self._get(name)
            nested = value if isinstance(value, Mapping) else {}
            self._sections[name] = ConfigReader(nested, f"{self.name}: {name}")
        return self._sections[name]

    def sections(self, name: str) -> list[Mapping[str, object]]:
        """A list of tables, one a layer; ConfigError if the field is missing or not a list of
        tables."""
        value = self._get(name)
        if not isinstance(value, Sequence) or not all(isinstance(v, Mapping) for v in value):
            raise ConfigError(f"{self.name}: field {name} is no list of tables, one a layer")
        return list(value)

    def table(self, name: str) -> Mapping[str, object]:
        """A table as it is, or an empty one; a table beside a nested text part comes first."""
        own = self._get(name)
        value = self._outer.get(name) or own
        return value if isinstance(value, Mapping) else {}

    def overlaid(self, overrides: Mapping[str, object]) -> ConfigReader:
        """The same config with other values for some fields; shares the record of read fields."""
        reader = ConfigReader({**self._fields, **overrides}, self.name)
        reader.model_type, reader._defaults = self.model_type, self._defaults
        reader._read, reader._sections = self._read, self._sections
        return reader

    def supersede(self, *names: str) -> None:
        """Count fields as read whose meaning other fields have taken over."""
        self._read.update(names)

    def unread_fields(self) -> list[str]:
        """Fields that are set, that nothing has read, and that may change the cache."""
        unread = [
            field
            for field, value in self._fields.items()
            if field not in self._read
            and value not in (None, False, 0, "", [], {})
            and not is_harmless(field)
        ]
        nested = [f"{n}.{f}" for n, part in self._sections.items() for f in part.unread_fields()]
        return sorted(unread + nested)

    def _get(self, field: str) -> object:
        self._read.add(field)
        value = self._fields.get(field)
        if value is None and field in ("dtype", "torch_dtype"):
            return self._outer.get(field)
        return self._defaults.get(field) if field not in self._fields else value


def _text_part(config: Mapping[str, object]) -> Mapping[str, object]:
    for key in _TEXT_CONFIGS:
        nested = config.get(key)
        if isinstance(nested, Mapping):
            return _text_part(nested)
    return config


@cache
def _harmless() -> tuple[frozenset[str], re.Pattern[str]]:
    """Names, and the families of names."""
    text = resources.files("prfaas.planner").joinpath("data/harmless_fields.txt").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    names = frozenset(line for line in lines if not line.startswith("~"))
    return names, re.compile("|".join(f"(?:{line[1:]})" for line in lines if line[0] == "~"))


def is_harmless(field: str) -> bool:
    """Return True if the field is known not to change the size of a KV cache."""
    names, families = _harmless()
    return field in names or families.fullmatch(field) is not None
