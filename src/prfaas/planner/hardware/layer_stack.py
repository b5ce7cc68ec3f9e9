"""Times of a whole model from two engines with fewer of its layers.

A model that does not fit an accelerator does so with part of its layers. At one length or batch a
time is a + b L seconds for L layers: a is the embedding, the head, the sampler and the request's
way, b is one layer. Two engines give both. Layers of a hybrid model differ, so each engine has to
have whole periods of their pattern.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prfaas.errors import ConfigError, EngineError
from prfaas.planner.hardware.measure import MeasuredPoint


@dataclass(frozen=True, slots=True)
class LayerStack:
    """Layers of the two engines, and of the whole model.

    Raises:
        ConfigError: They are not three numbers that rise.
    """

    few: int
    more: int
    whole: int

    def __post_init__(self) -> None:
        if not 0 < self.few < self.more < self.whole:
            raise ConfigError(
                f"layers {self.few},{self.more},{self.whole}: those of the two engines and of the "
                "whole model have to rise, as in 8,16,61"
            )

    def whole_samples(
        self, few: Sequence[MeasuredPoint], more: Sequence[MeasuredPoint]
    ) -> list[MeasuredPoint]:
        """Times of the whole model: its median and, by the spread of both, its bounds.

        Args:
            few: Samples of the engine with fewer layers.
            more: Samples at the same points of the other one.

        Raises:
            EngineError: More layers do not take longer at a point.
        """
        return [self._whole(*pair) for pair in zip(few, more, strict=True)]

    def _whole(self, few: MeasuredPoint, more: MeasuredPoint) -> MeasuredPoint:
        if more.median <= few.median:
            raise EngineError(
                f"at {few.x:.0f}, {self.more} layers take {more.median * 1e3:.3g} ms and "
                f"{self.few} layers {few.median * 1e3:.3g} ms; more layers have to take longer: "
                "measure longer prompts, more --repeats, or engines that differ by more layers"
            )
        low = self._extended(_bound(few, +1), _bound(more, -1))
        high = self._extended(_bound(few, -1), _bound(more, +1))
        # The whole takes at least as long as a part.
        low = max(low, more.median)
        return MeasuredPoint(few.x, (low, self._extended(few.median, more.median), high))

    def _extended(self, few_s: float, more_s: float) -> float:
        layer_s = (more_s - few_s) / (self.more - self.few)
        return more_s + (self.whole - self.more) * layer_s


def _bound(sample: MeasuredPoint, sign: int) -> float:
    return sample.median * (1 + sign * sample.spread / 2)
