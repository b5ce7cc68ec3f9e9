"""Comparison of logits after a changed prefix cache with those after the cache as it is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from prfaas.quality.caches import Change, TaskSample, unchanged, zeroed

Logits = NDArray[np.float64]
Cache = TypeVar("Cache")
NATS_MIN, RECALL_MIN = 1.0, 0.95
"""A text measures something if an empty cache costs that much, or the model recalls that much."""
CONTROL = "zeroed"


class Model(Protocol[Cache]):
    """A language model with a cache that can be changed."""

    def prefill(self, tokens: Sequence[int]) -> Cache:
        """Return the cache of a prefix."""

    def logits(self, cache: Cache, change: Change, tokens: Sequence[int]) -> Logits:
        """Return the logits after each token, which follow a prefix whose cache was changed.

        The cache is not changed by it. Shape: tokens, vocabulary.
        """


@dataclass(frozen=True, slots=True)
class Score:
    """Comparison of an arm with the cache as it is, over all tokens that were asked for."""

    kl: float
    """Mean divergence of the next token's distribution from that without the codec, nats."""
    agreement: float
    """Share of tokens with the same most likely token."""
    perplexity_ratio: float
    """Perplexity for that without the codec."""
    recalled: float
    """Share of tokens whose most likely token is the right one."""
    nats: float
    """Mean loss of a token, nats."""


@dataclass(frozen=True, slots=True)
class TextFindings:
    """Results of a model on one kind of text."""

    name: str
    scores: Mapping[str, Score]
    """By arm; `raw` and `zeroed` are among them."""
    num_tokens: int
    """Tokens that were asked for."""

    @property
    def lost_nats(self) -> float:
        """Cost of an empty cache for each token."""
        return self.scores[CONTROL].nats - self.scores["raw"].nats

    @property
    def is_conclusive(self) -> bool:
        """Return True if the texts need their prefix, so that they can show a codec's harm."""
        return self.lost_nats >= NATS_MIN or self.scores["raw"].recalled >= RECALL_MIN

    @property
    def verdict(self) -> str:
        """For people."""
        raw = self.scores["raw"].recalled
        figures = f"zeroing costs {self.lost_nats:.2f} nats, recall without a codec is {raw:.0%}"
        return figures if self.is_conclusive else f"inconclusive: {figures}"


@dataclass(slots=True)
class _Sums:
    kl: float = 0.0
    agreed: int = 0
    nats: float = 0.0
    recalled: int = 0


def compare(
    name: str, model: Model[Cache], samples: Iterable[TaskSample], arms: Mapping[str, Change]
) -> TextFindings:
    """Compare codecs on texts of one kind.

    Args:
        samples: The texts, at least one.
        arms: Codecs by name; `raw` and `zeroed` are added.
    """
    every = {"raw": unchanged, **arms, CONTROL: zeroed}
    sums: dict[str, _Sums] = {arm: _Sums() for arm in every}
    count = 0
    for sample in samples:
        cache, asked = model.prefill(sample.prefix), np.array(sample.asked)
        right = np.array(sample.rest)[asked]
        count += len(asked)
        raw = None
        for arm, change in every.items():
            found = _log_softmax(model.logits(cache, change, sample.rest[:-1])[asked - 1])
            raw = found if raw is None else raw
            _add(sums[arm], found, raw, right)
    plain = sums["raw"].nats / count
    return TextFindings(
        name, {arm: _score(each, count, plain) for arm, each in sums.items()}, count
    )


def _add(sums: _Sums, found: Logits, raw: Logits, right: NDArray[np.int64]) -> None:
    best = found.argmax(-1)
    sums.kl += float((np.exp(raw) * (raw - found)).sum())
    sums.agreed += int((best == raw.argmax(-1)).sum())
    sums.recalled += int((best == right).sum())
    sums.nats -= float(found[np.arange(len(right)), right].sum())


def _score(sums: _Sums, count: int, plain: float) -> Score:
    nats = sums.nats / count
    return Score(
        sums.kl / count,
        sums.agreed / count,
        math.exp(min(nats - plain, 700.0)),
        sums.recalled / count,
        nats,
    )


def _log_softmax(logits: Logits) -> Logits:
    top = logits - logits.max(-1, keepdims=True)
    result: Logits = top - np.log(np.exp(top).sum(-1, keepdims=True))
    return result
