"""The demo's checkpoint hangs on its KV cache: a comparison of answers can fail."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prfaas.engines.checkpoint import make_checkpoint

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(240)

PROMPT_TOKENS = 700
ANSWER_TOKENS = 12
BLOCK = slice(256, 512)
"""Neither the first tokens nor the last."""


@dataclass
class Answer:
    """Continuations of a damaged cache and of the whole one.

    Attributes:
        nats: Mean surprise at the whole one's tokens, nats a token.
        num_other: Tokens that it would have chosen otherwise.
    """

    nats: float
    num_other: int


def _tensors(layer: Any, *names: str) -> Iterator[Any]:
    """Tensors of a layer's cache; those of linear state lie in a list or a table."""
    for name in names:
        value = getattr(layer, name, [])
        if isinstance(value, torch.Tensor):
            yield value
        else:
            yield from value.values() if isinstance(value, dict) else value


def _whole(_cache: Any) -> None:
    return


def _nothing(cache: Any) -> None:
    for layer in cache.layers:
        for tensor in _tensors(layer, "keys", "values", "conv_states", "recurrent_states"):
            tensor.zero_()


def _no_state(cache: Any) -> None:
    for layer in cache.layers:
        for tensor in _tensors(layer, "recurrent_states"):
            tensor.zero_()


def _one_block_less(cache: Any) -> None:
    for layer in cache.layers:
        for tensor in _tensors(layer, "keys", "values"):
            tensor[:, :, BLOCK] = 0


DAMAGE: dict[str, Callable[[Any], None]] = {
    "whole": _whole,
    "nothing": _nothing,
    "no state": _no_state,
    "one block less": _one_block_less,
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    from transformers import AutoModelForCausalLM

    path = tmp_path_factory.mktemp("checkpoint") / "model"
    make_checkpoint(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    text = (Path(__file__).parents[2] / "LICENSE").read_bytes()[:PROMPT_TOKENS]
    with torch.no_grad():
        prompt = model(input_ids=torch.tensor([list(text)]), use_cache=True)
        token = prompt.logits[0, -1].argmax()
        caches = {name: copy.deepcopy(prompt.past_key_values) for name in DAMAGE}
        for name, damage in DAMAGE.items():
            damage(caches[name])
        found = {name: Answer(0.0, 0) for name in DAMAGE}
        for _ in range(ANSWER_TOKENS):
            chances = {}
            for name, cache in caches.items():
                step = model(input_ids=token.view(1, 1), past_key_values=cache, use_cache=True)
                chances[name] = step.logits[0, -1].log_softmax(-1)
            token = chances["whole"].argmax()
            for name, answer in found.items():
                answer.nats -= float(chances[name][token]) / ANSWER_TOKENS
                answer.num_other += int(chances[name].argmax() != token)
    return found


@pytest.mark.parametrize("damage", ["nothing", "no state"])
def test_zeroing_the_cache_costs_more_than_a_nat_a_token(
    answers: dict[str, Answer], damage: str
) -> None:
    assert answers[damage].nats - answers["whole"].nats > 1
    assert answers[damage].num_other > ANSWER_TOKENS // 2


def test_the_loss_of_one_block_changes_the_answer(answers: dict[str, Answer]) -> None:
    assert answers["one block less"].num_other > 0


def test_the_first_choice_is_clear(answers: dict[str, Answer]) -> None:
    """So that rounding, which differs between engines, does not choose."""
    assert answers["whole"].nats < 1.5
