"""Default values of `transformers`' config classes, as the planner reads them.

    python tests/planner/hf_defaults.py > src/prfaas/planner/data/hf_defaults.json

A published `config.json` leaves out fields that have the default of its config class. The file
has, by model type, the defaults of the fields that the planner reads; the layer types that a class
gives to layers in turn where the config lists none; the model type of the text part of a
multimodal config; and the model types that generate no text from a cache of their own.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

_READERS = ("hf_config", "hf_groups", "hf_layers", "hf_reader")
_SEQ2SEQ = "is_encoder_decoder"
_MODEL = Path(__file__).parents[2] / "src" / "prfaas" / "planner" / "model"
_GENERATES = re.compile(
    r"MODEL_FOR_(CAUSAL_LM|IMAGE_TEXT_TO_TEXT|MULTIMODAL_LM|SEQ_TO_SEQ_CAUSAL_LM|SPEECH_SEQ_2_SEQ)"
    r"_MAPPING_NAMES"
)


def fields_read() -> set[str]:
    """Every text in the modules that read a config; the names of its fields are among them."""
    trees = (ast.parse((_MODEL / f"{name}.py").read_text()) for name in _READERS)
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def main() -> None:
    """Print one JSON object, one model type a line."""
    warnings.filterwarnings("ignore")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical"}
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    generating: set[str] = set()
    for name in filter(_GENERATES.fullmatch, dir(modeling_auto)):
        generating |= set(getattr(modeling_auto, name))
    classes = {name: CONFIG_MAPPING[name] for name in sorted(CONFIG_MAPPING_NAMES)}
    text = {name: part for name, cls in classes.items() if (part := _text_type(name, cls))}
    decoders = generating | {text[name] for name in generating & set(text)}
    fields = fields_read() - {"dtype", "torch_dtype", "model_type"}
    masked = set(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES) | {"bert-generation"}
    encoders = {
        name
        for name, cls in classes.items()
        if name not in decoders
        or (name in masked and _defaults(cls, {"is_decoder"}) == {"is_decoder": False})
    }
    found = {name: _defaults(classes[name], fields) for name in sorted(decoders - encoders)}
    patterns = {n: p for n in found if (p := _pattern(classes[n]))}
    print(json.dumps({"transformers": transformers.__version__})[:-1] + ",")
    print(_lines("text", {k: v for k, v in text.items() if k in generating}))
    print(f' "encoders": {json.dumps(sorted(encoders))},')
    print(_lines("patterns", patterns))
    print(_lines("defaults", found).removesuffix(",") + "}")


def _text_type(name: str, cls: Any) -> str | None:
    try:
        part = cls().get_text_config()
    except Exception as problem:
        print(f"{name}: {type(problem).__name__}", file=sys.stderr)
        return None
    return None if part.model_type == name else str(part.model_type)


def _defaults(cls: Any, fields: set[str]) -> dict[str, int | str]:
    """Defaults of the class itself, before it derives values from others."""
    found = {
        field.name: field.default
        for field in dataclasses.fields(cls)
        if field.name in fields and isinstance(field.default, (int, str))
    }
    return found if found.pop(_SEQ2SEQ, False) is not True else {_SEQ2SEQ: True}


def _pattern(cls: Any) -> list[str]:
    """The shortest period of the layer types of configs of two depths; empty if there is none."""
    try:
        depths = [_layer_types(cls(num_hidden_layers=depth)) for depth in (24, 31)]
    except Exception:
        return []
    for period in range(2, 9):
        pattern = depths[0][:period]
        if len(set(pattern)) > 1 and all(_repeats(types, pattern) for types in depths):
            return pattern
    return []


def _layer_types(config: Any) -> list[str]:
    return list(getattr(config, "layer_types", None) or config.layers_block_type)


def _repeats(types: list[str], pattern: list[str]) -> bool:
    return all(kind == pattern[i % len(pattern)] for i, kind in enumerate(types))


def _lines(key: str, table: dict[str, Any]) -> str:
    rows = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in table.items())
    return f' "{key}": {{\n{rows}\n }},'


if __name__ == "__main__":
    main()
