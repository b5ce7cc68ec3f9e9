"""The measure of quality: exact without a codec, harmed by worse ones, and honest about models that
cannot show anything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from prfaas.cli.operate.quality_command import InconclusiveError, quality
from prfaas.core.codec.codecs import Quality
from prfaas.errors import ConfigError
from prfaas.quality.caches import (
    Change,
    LayerCache,
    copying,
    later_chunks,
    recall,
    rounded,
    unchanged,
    zeroed,
)
from prfaas.quality.compare import Logits, TextFindings, compare

VOCABULARY, SIZE = range(64), 64
CODES = np.random.default_rng(0).choice([-1.0, 1.0], (len(VOCABULARY), SIZE)).astype(np.float32)
ARMS = {each.value: rounded(each, 32) for each in (Quality.FP8, Quality.KIVI4)}


def bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    return ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def numbers(found: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (found.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class Induction:
    """One head of attention that looks for the token before, and returns the token after.

    The key of a token is the code of the one before it, its value its own code. With a gain of 0 it
    attends to everything alike, as a model with random weights does.
    """

    gain: float = 0.2
    noise: float = 0.3

    def cache(self, tokens: Sequence[int], before: int | None = None) -> LayerCache:
        earlier = [tokens[-1] if before is None else before, *tokens[:-1]]
        dice = np.random.default_rng(sum(tokens))
        noise = self.noise * dice.standard_normal((2, len(tokens), SIZE)).astype(np.float32)
        keys, values = CODES[earlier] + noise[0], CODES[list(tokens)] + noise[1]
        return LayerCache(bits(keys)[None], bits(values)[None])

    def prefill(self, tokens: Sequence[int]) -> tuple[int, LayerCache]:
        return tokens[-1], self.cache(tokens)

    def logits(
        self, cache: tuple[int, LayerCache], change: Change, tokens: Sequence[int]
    ) -> Logits:
        last, prefix = cache
        changed = change(replace(prefix))
        own = self.cache(tokens, last)
        assert changed.keys is not None
        assert changed.values is not None
        assert own.keys is not None
        assert own.values is not None
        keys = numbers(np.concatenate([changed.keys, own.keys], 1))[0]
        values = numbers(np.concatenate([changed.values, own.values], 1))[0]
        num = prefix.keys.shape[1] if prefix.keys is not None else 0
        found = []
        for at, token in enumerate(tokens):
            seen = num + at + 1
            weights = np.exp(self.gain * (keys[:seen] @ CODES[token] - SIZE))
            found.append(weights / weights.sum() @ values[:seen] @ CODES.T * 0.2)
        return np.array(found, np.float64)


def measured(model: Induction, num: int = 6) -> list[TextFindings]:
    return [
        compare(name, model, samples, ARMS)
        for name, samples in (
            ("recall", [recall(VOCABULARY, 24, 12, seed) for seed in range(num)]),
            ("copying", [copying(VOCABULARY, 60, seed) for seed in range(num)]),
        )
    ]


def test_a_model_that_recalls_shows_what_codecs_and_an_empty_cache_cost() -> None:
    [found, _] = measured(Induction())

    assert found.is_conclusive
    assert found.num_tokens == 6 * 12
    assert not found.verdict.startswith("inconclusive")
    raw, fp8, kivi, empty = (
        found.scores[arm] for arm in ("raw", Quality.FP8, Quality.KIVI4, "zeroed")
    )
    assert (raw.kl, raw.agreement, raw.perplexity_ratio) == (0, 1, 1)
    assert raw.recalled >= 0.95
    assert 0 < fp8.kl < kivi.kl < empty.kl
    assert fp8.recalled >= 0.95
    assert empty.recalled < 0.3
    assert empty.perplexity_ratio > np.e


def test_a_model_that_looks_nowhere_is_inconclusive_though_every_codec_looks_perfect() -> None:
    for found in measured(Induction(gain=0.0)):
        assert found.scores[Quality.KIVI4].perplexity_ratio == pytest.approx(1, abs=0.02)
        assert not found.is_conclusive
        assert found.verdict.startswith("inconclusive")


def test_the_cache_of_a_model_is_not_changed_by_an_arm() -> None:
    model, sample = Induction(), recall(VOCABULARY, 10, 5, 0)
    cache = model.prefill(sample.prefix)
    before = model.logits(cache, unchanged, sample.rest)

    for change in (*ARMS.values(), zeroed):
        assert (model.logits(cache, change, sample.rest) != before).any()

    assert (model.logits(cache, unchanged, sample.rest) == before).all()


def test_states_are_rounded_by_their_own_switch_alone() -> None:
    states = (np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32),)
    layer = LayerCache(states=states)

    assert rounded(Quality.FP8, 16)(layer).states is states
    [found] = rounded(Quality.FP8_STATE, 16)(layer).states
    assert np.abs(found - states[0]).max() <= np.abs(states[0]).max() / 256
    assert not (found.view(np.uint32) & 0xFFFF).any()


def test_texts_have_determined_answers() -> None:
    sample = recall(VOCABULARY, 12, 6, 3)
    pairs = dict(zip(sample.prefix[::2], sample.prefix[1::2], strict=True))

    assert [sample.rest[at] for at in sample.asked] == [
        pairs[sample.rest[at - 1]] for at in sample.asked
    ]
    assert copying(VOCABULARY, 9, 1).prefix == copying(VOCABULARY, 9, 1).rest
    chunks = later_chunks(range(100), 20, 10, 9)
    assert [chunk.prefix[0] for chunk in chunks] == [0, 30, 60]
    assert [chunk.rest[0] for chunk in chunks] == [20, 50, 80]
    with pytest.raises(ConfigError, match="12 of 40 pairs"):
        recall(VOCABULARY, 40, 12, 0)
    with pytest.raises(ConfigError, match="a chunk has 200"):
        later_chunks(range(100), 100, 100, 1)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers with random weights."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.timeout(300)
def test_the_command_says_that_random_weights_show_nothing(random_model: Path) -> None:
    arguments = [str(random_model), "--codec", "fp8", "--codec", "kivi4", "--samples", "2"]

    done = CliRunner().invoke(quality, [*arguments, "--json"])

    assert isinstance(done.exception, InconclusiveError)
    [first, _] = json.loads(done.stdout)
    assert not first["conclusive"]
    assert first["scores"]["kivi4"]["perplexity_ratio"] == pytest.approx(1, abs=0.05)
    assert first["scores"]["raw"]["kl"] == 0
    assert first["scores"]["zeroed"]["kl"] > first["scores"]["fp8"]["kl"] > 0


def test_a_model_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    done = CliRunner().invoke(quality, [str(tmp_path), "--codec", "fp8"])

    assert isinstance(done.exception, ConfigError)
