"""The limited prefix cache against a plain model of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.cache.prefix_cache import PrefixCache

PROMPTS = st.lists(st.integers(0, 30), max_size=12, unique=True)
STEPS = st.lists(
    st.tuples(st.sampled_from(["store", "touch", "demote", "clear"]), PROMPTS), max_size=40
)


class Model:
    """A list of (key, room), least recently used first."""

    def __init__(self, capacity: int | None, room: int) -> None:
        self.capacity, self.room = capacity, room
        self.held: list[tuple[tuple[str, int], int]] = []

    def renew(self, key: tuple[str, int], room: int, *, add: bool) -> None:
        there = (key, room) in self.held
        if there:
            self.held.remove((key, room))
        if there or add:
            self.held.append((key, room))

    def use(self, blocks: list[int], *, add: bool) -> None:
        for i in reversed(range(len(blocks))):
            if self.room and i == len(blocks) - 1:
                self.renew(("checkpoint", blocks[i]), self.room, add=add)
            self.renew(("block", blocks[i]), 1, add=add)
        while self.capacity is not None and sum(room for _, room in self.held) > self.capacity:
            self.held.pop(0)

    def demote(self, blocks: list[int]) -> None:
        for block in blocks:
            if (("block", block), 1) in self.held:
                self.held.remove((("block", block), 1))
                self.held.insert(0, (("block", block), 1))

    def hit(self, blocks: list[int]) -> int:
        keys = [key for key, _ in self.held]
        run = 0
        while run < len(blocks) and ("block", blocks[run]) in keys:
            run += 1
        while self.room and run and ("checkpoint", blocks[run - 1]) not in keys:
            run -= 1
        return run


@given(steps=STEPS, capacity=st.none() | st.integers(1, 30), room=st.integers(0, 3), probe=PROMPTS)
def test_it_behaves_as_the_plain_model(
    steps: list[tuple[str, list[int]]], capacity: int | None, room: int, probe: list[int]
) -> None:
    cache, model = PrefixCache(capacity, room), Model(capacity, room)
    for action, blocks in steps:
        if action == "clear":
            cache.clear()
            model.held = []
        elif action == "store":
            cache.store(blocks)
            model.use(blocks, add=True)
        elif action == "demote":
            cache.demote(blocks)
            model.demote(blocks)
        else:
            cache.touch(blocks, len(blocks))
            model.use(blocks, add=False)
        assert cache.used_blocks == sum(size for _, size in model.held)
        cache.validate()
    assert cache.usable_hit(probe) == model.hit(probe)


def test_linear_state_is_usable_only_where_it_was_kept() -> None:
    cache = PrefixCache(checkpoint_blocks=2)
    cache.store([1, 2, 3, 4], checkpoint_at=3)
    assert cache.leading_run([1, 2, 3, 4]) == 4
    assert cache.usable_hit([1, 2, 3, 4]) == 3
    assert cache.usable_hit([1, 2, 9]) == 0


@pytest.mark.parametrize(("capacity", "room"), [(0, 0), (5, -1)])
def test_limits_out_of_range_are_refused(capacity: int, room: int) -> None:
    with pytest.raises(ValueError, match="has to be"):
        PrefixCache(capacity, room)
