"""The table against a dictionary, through growth, churn and shrinking."""

import numpy as np
import pytest

from prfaas.core.kv.block_table import SLOTS_MIN, BlockTable, Keys, Values

NUM_KEYS = 30_000
UNIVERSE: Keys = np.random.default_rng(0).integers(1, 2**64 - 1, NUM_KEYS, dtype=np.uint64)


def as_they_are(values: Values) -> Values:
    return values


def agree(table: BlockTable, model: dict[int, int]) -> bool:
    expected = [model.get(key, 0) for key in UNIVERSE.tolist()]
    return bool(table.get(UNIVERSE).tolist() == expected)


@pytest.mark.parametrize("seed", range(4))
def test_it_holds_what_a_dictionary_holds(seed: int) -> None:
    draw = np.random.default_rng(seed)
    table, model = BlockTable(as_they_are), dict[int, int]()
    for step in range(60):
        # It fills up, churns, and empties.
        chance_kept = (0.95, 0.5, 0.05)[step // 20]
        keys = draw.choice(UNIVERSE, draw.integers(1, 4000), replace=False)
        values = draw.integers(1, 9, len(keys)).astype(np.uint32)
        values[draw.random(len(keys)) > chance_kept] = 0
        table.put(keys, values, len(model))
        model |= dict(zip(keys.tolist(), values.tolist(), strict=True))
        model = {key: value for key, value in model.items() if value}
        assert agree(table, model)


@pytest.mark.parametrize("large", [2**16, 2**32 - 1])
def test_a_value_that_needs_more_room_comes_while_the_table_grows(large: int) -> None:
    table, model = BlockTable(as_they_are), dict[int, int]()
    for start in range(0, NUM_KEYS, 1000):
        keys = UNIVERSE[start : start + 1000]
        values = np.full(1000, large if start == 9000 else 2**16 - 1, np.uint32)
        table.put(keys, values, len(model))
        model |= dict(zip(keys.tolist(), values.tolist(), strict=True))
        table.validate()
        assert agree(table, model)


def test_its_size_follows_what_it_holds() -> None:
    table, num_live = BlockTable(as_they_are), 0
    for start in range(0, NUM_KEYS, 1000):
        table.put(UNIVERSE[start : start + 1000], np.ones(1000, np.uint32), num_live)
        num_live += 1000
    full = table.num_bytes
    assert 10 * NUM_KEYS < full < 100 * NUM_KEYS
    # The same blocks come and go: it neither fills up with the dead nor grows.
    for start in range(0, NUM_KEYS, 1000):
        table.put(UNIVERSE[start : start + 1000], np.zeros(1000, np.uint32), num_live)
        num_live -= 1000
    fresh = np.random.default_rng(1).integers(1, 2**64 - 1, 1_000_000, dtype=np.uint64)
    for start in range(0, len(fresh), 1000):
        table.put(fresh[start : start + 1000], np.ones(1000, np.uint32), 1000)
        table.put(fresh[start : start + 1000], np.zeros(1000, np.uint32), 1000)
    assert table.num_bytes <= 20 * SLOTS_MIN * 4
    assert not table.get(fresh[:5000]).any()


def test_dropped_values_are_not_moved() -> None:
    """Dropped values are not copied into the next table."""
    table = BlockTable(lambda values: np.where(values == 7, 0, values).astype(np.uint32))
    table.put(UNIVERSE[:1000], np.full(1000, 7, np.uint32), 0)
    for start in range(1000, NUM_KEYS, 1000):
        table.put(UNIVERSE[start : start + 1000], np.ones(1000, np.uint32), start)
    assert not table.get(UNIVERSE[:1000]).any()
    assert table.get(UNIVERSE[1000:]).all()
