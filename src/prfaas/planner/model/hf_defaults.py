"""Defaults of `transformers`' config classes, for fields that a published config leaves out.

The data file is written by `tests/planner/hf_defaults.py` and compared with the installed library
by `tests/planner/test_hf_defaults.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

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
