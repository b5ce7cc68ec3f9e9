"""Models of Hugging Face transformers, whose caches can be changed. Imports torch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from prfaas.errors import ConfigError
from prfaas.quality.caches import Change, LayerCache
from prfaas.quality.compare import Logits


class TransformersModel:
    """A causal language model in bfloat16.

    Args:
        model: The model; it is moved nowhere.
    """

    def __init__(self, model: Any) -> None:
        self._model = model.eval()

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self._model.config.get_text_config().vocab_size)

    def prefill(self, tokens: Sequence[int]) -> Any:
        """Return the cache of a prefix."""
        with torch.inference_mode():
            return self._model(input_ids=self._ids(tokens), use_cache=True).past_key_values

    def logits(self, cache: Any, change: Change, tokens: Sequence[int]) -> Logits:
        """Return the logits after each token that follows a prefix with a changed cache."""
        with torch.inference_mode():
            own = copy.deepcopy(cache)
            for layer in own.layers:
                _replace(layer, change)
            found = self._model(input_ids=self._ids(tokens), past_key_values=own, use_cache=True)
        logits: Logits = found.logits[0].double().cpu().numpy()
        return logits

    def _ids(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(tokens)], device=self._model.device)


def _replace(layer: Any, change: Change) -> None:
    keys, values = (getattr(layer, name, None) for name in ("keys", "values"))
    states = getattr(layer, "recurrent_states", {})
    known = {number: state for number, state in states.items() if state is not None}
    found = change(
        LayerCache(
            _bits(keys),
            _bits(values),
            tuple(state.float().cpu().numpy() for state in known.values()),
        )
    )
    if found.keys is not None and found.values is not None:
        layer.keys, layer.values = _tensor(found.keys, keys), _tensor(found.values, values)
    for (number, before), after in zip(known.items(), found.states, strict=True):
        states[number] = torch.from_numpy(after.copy()).to(before)


def _bits(tensor: Any) -> Any:
    if tensor is None or tensor.numel() == 0:
        return None
    whole: Any = tensor[0].to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy()
    return whole.view(np.uint16)


def _tensor(bits: Any, like: torch.Tensor) -> torch.Tensor:
    signed = np.ascontiguousarray(bits).view(np.int16)
    return torch.from_numpy(signed.copy()).view(torch.bfloat16)[None].to(like)


def load(path: str, device: str) -> TransformersModel:
    """Return the model in a folder, or of a name that transformers finds; ConfigError if it cannot
    be loaded."""
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        return TransformersModel(model.to(device))
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"the model {path} cannot be loaded: {error}") from None


def text_tokens(path: str, text: Path) -> list[int]:
    """Return the tokens of a text file by the tokenizer of a model; ConfigError if either cannot be
    read."""
    try:
        words = text.read_text(encoding="utf-8")
        return list(transformers.AutoTokenizer.from_pretrained(path)(words)["input_ids"])
    except (OSError, ValueError) as error:
        raise ConfigError(f"{text} cannot be tokenised by {path}: {error}") from None
