"""The table against a dictionary, through growth, churn and shrinking."""

from unittest.mock import patch

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


@pytest.mark.parametrize("seed", range(4))
def test_prompts_that_came_in_turns_are_what_a_dictionary_says(seed: int) -> None:
    draw = np.random.default_rng(seed)
    table, model = BlockTable(as_they_are), dict[int, int]()
    chains = UNIVERSE[:24_000].reshape(12, 2000)
    length = np.zeros(12, int)
    for _ in range(150):
        # Turns of several prompts are mixed; blocks leave anywhere, and come back elsewhere.
        chain = int(draw.integers(12))
        start = int(length[chain])
        length[chain] = end = min(start + int(draw.integers(1, 400)), 2000)
        gone = chains[chain, draw.integers(0, max(end, 1), draw.integers(0, 40))]
        gone = np.unique(gone)
        for keys, value in ((chains[chain, start:end], int(draw.integers(1, 9))), (gone, 0)):
            table.put(keys, np.full(len(keys), value, np.uint32), len(model))
            model |= dict.fromkeys(keys.tolist(), value)
        asked = chains[
            int(draw.integers(12)), int(draw.integers(0, 500)) :: int(draw.integers(1, 3))
        ]
        asked = asked[::-1] if draw.random() < 0.3 else asked
        assert table.get(asked).tolist() == [model.get(key, 0) for key in asked.tolist()]
    table.validate()
    assert agree(table, model)


def test_blocks_of_a_session_are_found_beside_each_other() -> None:
    """Of 43 turns, the index is asked for one block in 64, and for those at a turn's ends alone."""
    table, turns = BlockTable(as_they_are), UNIVERSE[: 43 * 600].reshape(43, 2, 300)
    for turn in turns.reshape(-1, 300):
        table.put(turn, np.ones(300, np.uint32), 43 * 600)
    asked = turns[:, 0].ravel()
    slots = table._slots
    with patch.object(slots, "_look_up", wraps=slots._look_up) as look_up:
        assert table.get(asked).all()
    num_keys = sum(len(call.args[0]) for call in look_up.call_args_list)
    assert num_keys <= len(asked) // 64 + 43 * 4
