"""The prefix index against a dictionary and a brute-force reading of what a hit is."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prfaas.core.kv.block_table import short_key, short_keys_of
from prfaas.core.kv.blocks import BlockKey, CacheGroup, GroupKind, Layout
from prfaas.core.kv.prefix_index import FEW_KEYS, PrefixIndex, SourceState, Tier

FULL, WINDOW, STATE = GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW, GroupKind.LINEAR_STATE
LAYOUTS = [
    Layout(b"a" * 32, 4, "0", (CacheGroup(0, FULL, 4, 10),)),
    Layout(b"b" * 32, 4, "0", (CacheGroup(0, FULL, 4, 10), CacheGroup(1, STATE, 8, 20))),
    Layout(b"c" * 32, 4, "0", (CacheGroup(0, FULL, 8, 10), CacheGroup(1, WINDOW, 4, 10, 10))),
    Layout(
        b"d" * 32,
        4,
        "0",
        (
            CacheGroup(0, FULL, 4, 10),
            CacheGroup(1, FULL, 12, 10),
            CacheGroup(2, STATE, 8, 10),
            CacheGroup(3, WINDOW, 8, 10, 5),
        ),
    ),
]
NUM_HASHES = 14
HASHES = [bytes([number]) * 32 for number in range(NUM_HASHES)]
POOLS = ["one", "two", "three"]
KEYS = st.builds(BlockKey, st.integers(0, 3), st.sampled_from(HASHES))
BATCHES = st.lists(KEYS, max_size=30)
LENGTHS = st.integers(0, NUM_HASHES * 4 + 3)
TIERS = st.sampled_from([Tier.HOST, Tier.DISK, Tier.DEVICE, Tier.HOST | Tier.DISK, Tier.ANY])

Held = set[tuple[bytes, BlockKey]]


def can_resume(layout: Layout, held: Held, length: int) -> bool:
    """Return True if every group holds all that prefill from `length` on needs, by token."""
    return all(
        (layout.layout_id, BlockKey(group.index, HASHES[end // layout.tokens_per_hash - 1])) in held
        for group in layout.groups
        for end in needed_ends(group, length)
    )


def needed_ends(group: CacheGroup, length: int) -> set[int]:
    span = group.tokens_per_block
    match group.kind:
        case GroupKind.FULL_ATTENTION:
            tokens = range(length)
        case GroupKind.SLIDING_WINDOW:
            tokens = range(max(0, length - group.window_tokens), length)
        case GroupKind.LINEAR_STATE:
            return {length}
    return {token // span * span + span for token in tokens}


def brute_force(layout: Layout, held: Held, num_tokens: int) -> int:
    boundary = layout.boundary_tokens
    hits = [n for n in range(boundary, num_tokens, boundary) if can_resume(layout, held, n)]
    return max(hits, default=0)


@dataclass
class Known:
    """The blocks of one pool by the model."""

    state: SourceState = SourceState.REBUILDING
    complete: bool = True
    lying: set[tuple[Tier, bytes, BlockKey]] = field(default_factory=set)

    @property
    def live_state(self) -> SourceState:
        return SourceState.EXACT if self.complete else SourceState.INCOMPLETE

    def held(self, tiers: Tier) -> Held:
        return {(layout, key) for tier, layout, key in self.lying if tier & tiers}


class IndexAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.known = {pool: Known() for pool in POOLS}

    @rule(pool=st.sampled_from(POOLS))
    def begin_snapshot(self, pool: str) -> None:
        self.index.begin_snapshot(pool)
        self.known[pool] = Known()

    @rule(pool=st.sampled_from(POOLS), complete=st.booleans())
    def end_snapshot(self, pool: str, complete: bool) -> None:
        self.index.end_snapshot(pool, complete=complete)
        known = self.known[pool]
        known.complete &= complete
        known.state = known.live_state

    @rule(pool=st.sampled_from(POOLS))
    def resume(self, pool: str) -> None:
        self.index.resume(pool)
        known = self.known[pool]
        if known.state is SourceState.DEGRADED:
            known.state = known.live_state

    @rule(pool=st.sampled_from(POOLS))
    def lose(self, pool: str) -> None:
        self.index.lose(pool)
        known = self.known[pool]
        if known.state is SourceState.REBUILDING:
            self.known[pool] = Known()
        else:
            known.state = SourceState.DEGRADED

    @rule(pool=st.sampled_from(POOLS), layout=st.sampled_from(LAYOUTS), keys=BATCHES, tiers=TIERS)
    def add(self, pool: str, layout: Layout, keys: list[BlockKey], tiers: Tier) -> None:
        self.index.add(pool, layout.layout_id, keys, tiers)
        self.known[pool].lying |= {(t, layout.layout_id, key) for key in keys for t in tiers}

    @rule(pool=st.sampled_from(POOLS), layout=st.sampled_from(LAYOUTS), length=st.integers(1, 13))
    def add_prefix(self, pool: str, layout: Layout, length: int) -> None:
        """Store the blocks of a prefill, so that long hits are common."""
        keys = [BlockKey(group.index, HASHES[n]) for group in layout.groups for n in range(length)]
        self.add(pool, layout, keys, Tier.HOST)

    @rule(pool=st.sampled_from(POOLS), layout=st.sampled_from(LAYOUTS), keys=BATCHES, tiers=TIERS)
    def remove(self, pool: str, layout: Layout, keys: list[BlockKey], tiers: Tier) -> None:
        self.index.remove(pool, layout.layout_id, keys, tiers)
        self.known[pool].lying -= {(t, layout.layout_id, key) for key in keys for t in tiers}

    @rule(
        changes=st.lists(
            st.tuples(
                st.booleans(), st.sampled_from(POOLS), st.sampled_from(LAYOUTS), BATCHES, TIERS
            ),
            min_size=2,
            max_size=8,
        )
    )
    def burst(self, changes: list[tuple[bool, str, Layout, list[BlockKey], Tier]]) -> None:
        """Changes that are written together, often of the same blocks."""
        for added, *change in changes:
            (self.add if added else self.remove)(*change)

    @rule(
        pool=st.sampled_from(POOLS),
        layout=st.sampled_from(LAYOUTS),
        num_tokens=LENGTHS,
        tiers=TIERS,
    )
    def ask(self, pool: str, layout: Layout, num_tokens: int, tiers: Tier) -> None:
        certain, hints = self.index.hits(layout, HASHES, num_tokens, tiers)
        for name, known in self.known.items():
            longest = brute_force(layout, known.held(tiers), num_tokens)
            assert certain.get(name, 0) == (longest if known.state.is_live else 0)
            is_hint = known.state is SourceState.DEGRADED
            assert hints.get(name, 0) == (longest if is_hint else 0)
        assert self.index.usable_hit(pool, layout, HASHES, num_tokens, tiers) == certain.get(
            pool, 0
        )

    @rule(pool=st.sampled_from(POOLS), layout=st.sampled_from(LAYOUTS), tiers=TIERS)
    def count_held(self, pool: str, layout: Layout, tiers: Tier) -> None:
        held = self.known[pool].held(tiers)
        for group in layout.groups:
            ends = range(group.tokens_per_block, NUM_HASHES * 4 + 1, group.tokens_per_block)
            names = [BlockKey(group.index, HASHES[end // 4 - 1]) for end in ends]
            expected = sum((layout.layout_id, name) in held for name in names)
            assert self.index.num_held(pool, layout, group, HASHES, tiers) == expected

    @invariant()
    def counts_agree(self) -> None:
        for pool, known in self.known.items():
            assert self.index.state(pool) is known.state
            assert self.index.num_blocks(pool) == len(known.held(Tier.ANY))
        everything = set.union(*(known.held(Tier.ANY) for known in self.known.values()))
        assert self.index.num_blocks_known == len(everything)


TestIndexAgainstModel = IndexAgainstModel.TestCase
TestIndexAgainstModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(layout=st.sampled_from(LAYOUTS), keys=BATCHES, more=BATCHES, num_tokens=LENGTHS)
def test_a_hit_is_a_boundary_below_the_prompt_and_more_blocks_never_shorten_it(
    layout: Layout, keys: list[BlockKey], more: list[BlockKey], num_tokens: int
) -> None:
    index = PrefixIndex()
    index.end_snapshot("pool")
    index.add("pool", layout.layout_id, keys)
    before = index.usable_hit("pool", layout, HASHES, num_tokens)
    index.add("pool", layout.layout_id, more)
    after = index.usable_hit("pool", layout, HASHES, num_tokens)
    assert before % layout.boundary_tokens == 0
    assert before < max(num_tokens, 1)
    assert before <= after


def test_few_and_many_changes_take_effect_in_their_order() -> None:
    index = PrefixIndex()
    many = [BlockKey(0, bytes([1, number]) * 16) for number in range(FEW_KEYS + 1)]
    for number, keys in enumerate((many, many[:3], many, many[:1], many[1:2])):
        (index.remove if number % 2 else index.add)("one", b"a" * 32, keys)
    assert index.num_blocks("one") == len(many) - 1
    index.remove("one", b"a" * 32, many[:4])
    index.add("one", b"a" * 32, many[2:4])
    assert index.num_blocks("one") == len(many) - 2


def test_one_short_key_is_as_several() -> None:
    keys = [BlockKey(group, bytes([7, group]) * 16) for group in range(3)]
    several = short_keys_of(b"l" * 32, keys).tolist()
    assert [short_key(b"l" * 32, *key) for key in keys] == several
    for wrong in (b"", b"x" * 31, b"x" * 33):
        with pytest.raises(ValueError, match="32 bytes"):
            short_key(b"l" * 32, 0, wrong)


def test_state_one_block_short_of_the_attention_run_decides() -> None:
    layout = LAYOUTS[1]
    index = PrefixIndex()
    index.end_snapshot("pool")
    index.add("pool", layout.layout_id, [BlockKey(0, block_hash) for block_hash in HASHES])
    assert index.usable_hit("pool", layout, HASHES, 50) == 0
    index.add("pool", layout.layout_id, [BlockKey(1, HASHES[3])])
    assert index.usable_hit("pool", layout, HASHES, 50) == 16
    assert index.usable_hit("pool", layout, HASHES, 17) == 16
    assert index.usable_hit("pool", layout, HASHES, 16) == 0


def test_a_pool_of_another_layout_serves_nothing() -> None:
    index = PrefixIndex()
    index.end_snapshot("pool")
    index.add("pool", b"z" * 32, [BlockKey(0, block_hash) for block_hash in HASHES])
    assert index.usable_hit("pool", LAYOUTS[0], HASHES, 40) == 0


def test_a_pool_beyond_the_limit_is_known_in_part_and_never_too_well() -> None:
    layout = LAYOUTS[0]
    index = PrefixIndex(num_blocks_max=3)
    keys = [BlockKey(0, HASHES[n]) for n in range(5)]
    index.begin_snapshot("p")
    index.add("p", layout.layout_id, keys[:2])
    index.end_snapshot("p")
    assert index.state("p") is SourceState.EXACT
    index.add("p", layout.layout_id, keys)
    assert index.state("p") is SourceState.INCOMPLETE
    assert index.num_blocks("p") == 3
    assert index.usable_hit("p", layout, HASHES, 100) == 12
    # There is room again, but what was not remembered is still not known.
    index.remove("p", layout.layout_id, keys[:1])
    assert index.state("p") is SourceState.INCOMPLETE
    index.begin_snapshot("p")
    index.add("p", layout.layout_id, keys)
    index.end_snapshot("p")
    assert index.state("p") is SourceState.INCOMPLETE
    index.begin_snapshot("p")
    index.end_snapshot("p")
    assert index.state("p") is SourceState.EXACT


def test_many_sources_share_what_a_block_costs() -> None:
    """And one of them is forgotten without the others."""
    layout, index, num_sources = LAYOUTS[0], PrefixIndex(), 300
    keys = [BlockKey(0, n.to_bytes(32, "big")) for n in range(5000)]
    names = [str(number) for number in range(num_sources)]
    for name in names:
        index.add(name, layout.layout_id, keys)
        index.end_snapshot(name)
    assert index.num_blocks_known == len(keys)
    assert index.num_bytes < 100 * len(keys)
    hashes = [key.block_hash for key in keys]
    assert index.hits(layout, hashes, 20_001) == (dict.fromkeys(names, 20_000), {})
    index.begin_snapshot("7")
    assert "7" not in index.hits(layout, hashes, 20_001)[0]
    assert index.num_blocks_known == len(keys)
    for name in names:
        index.begin_snapshot(name)
    assert index.num_blocks_known == 0


def test_hashes_are_told_apart_by_layout_and_group() -> None:
    index, hashes = PrefixIndex(), [bytes([n]) * 32 for n in range(64)]
    for number in range(8):
        index.add("p", bytes([number]) * 32, [BlockKey(number % 3, name) for name in hashes])
    assert index.num_blocks("p") == 8 * 64
