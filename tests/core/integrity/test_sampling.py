"""Selection of transfers: the bound of the issue, whatever a source alters."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from prfaas.core.integrity.sampling import SOURCES_MAX, Sampler

ONE_IN, ALTERED_MAX, SEEDS = 50, 250, 100
Pattern = Callable[[random.Random], Iterator[bool]]


def always(_: random.Random) -> Iterator[bool]:
    while True:
        yield True


def some(share: float) -> Pattern:
    def altered(chance: random.Random) -> Iterator[bool]:
        while True:
            yield chance.random() < share

    return altered


def one_a_window(chance: random.Random) -> Iterator[bool]:
    """The worst case: one in each window."""
    while True:
        place = chance.randrange(ONE_IN)
        yield from (number == place for number in range(ONE_IN))


def num_altered_until_found(pattern: Pattern, seed: int) -> int:
    """Altered transfers up to the first one that is verified."""
    chance = random.Random(seed)
    sampler = Sampler(ONE_IN, chance.randrange)
    count = 0
    for is_altered in pattern(random.Random(1000 + seed)):
        count += is_altered
        if sampler.takes("prfaas-pool") and is_altered:
            return count
    raise AssertionError


@pytest.mark.parametrize(
    "pattern", [always, some(0.5), some(0.1), some(0.02), one_a_window], ids=lambda p: p.__name__
)
def test_a_source_is_found_after_at_most_250_altered_transfers_in_99_of_100_runs(
    pattern: Pattern,
) -> None:
    counts = [num_altered_until_found(pattern, seed) for seed in range(SEEDS)]
    assert sum(count <= ALTERED_MAX for count in counts) >= 99


def test_one_transfer_of_each_window_is_selected_for_each_source() -> None:
    chance = random.Random(1)
    sampler = Sampler(ONE_IN, chance.randrange)
    taken = {name: [] for name in ("a", "b")}  # type: dict[str, list[bool]]
    for _ in range(20 * ONE_IN):
        for name, found in taken.items():
            found.append(sampler.takes(name))
    for found in taken.values():
        windows = [found[i : i + ONE_IN] for i in range(0, len(found), ONE_IN)]
        assert [sum(window) for window in windows] == [1] * 20
    assert taken["a"] != taken["b"]


def test_every_transfer_is_selected_at_one_in_one() -> None:
    sampler = Sampler(1, lambda _: 0)
    assert all(sampler.takes("a") for _ in range(10))


def test_many_sources_are_bounded() -> None:
    sampler = Sampler(ONE_IN, lambda _: 0)
    for number in range(2 * SOURCES_MAX):
        sampler.takes(str(number))
    assert len(sampler._windows) == SOURCES_MAX
