"""Pull or recompute, and what is copied: never slower as predicted, never beyond the budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.control.replication import (
    CopiedPrompt,
    CopySettings,
    HotPrefixes,
    Replication,
    marks,
)
from prfaas.core.routing.decision import RoutingFacts
from prfaas.core.routing.policies import PullSettings, choose_pull, with_pull
from prfaas.core.routing.predictions import Costs, DecodeWait, LinkState, PathSignals, predict
from prfaas.units import NS_PER_S

MS = NS_PER_S // 1000
LINKS = st.none() | st.builds(
    LinkState,
    st.sampled_from([0.0, 1e6, 1e9, 1e11]),
    st.integers(0, 10**10),
    st.integers(0, 200 * MS),
)
WORTHS = st.sampled_from([0.0, 0.5, 100.0])
"""Of a byte, as time, ns."""


def linear_ns(num_tokens: int, prefix_tokens: int = 0) -> int:
    return num_tokens * MS // 10


@given(
    prompt=st.integers(2, 100_000),
    here=st.integers(0, 100_000),
    there=st.integers(0, 100_000),
    wait_ns=st.none() | st.integers(0, 100 * NS_PER_S),
    link=LINKS,
    ns_per_byte=WORTHS,
    margin_ns=st.integers(0, NS_PER_S),
)
def test_a_pull_is_predicted_to_be_faster_or_it_is_not_made(
    prompt: int,
    here: int,
    there: int,
    wait_ns: int | None,
    link: LinkState | None,
    ns_per_byte: float,
    margin_ns: int,
) -> None:
    here, there = min(here, prompt - 1), min(there, prompt - 1)
    num_bytes = max(there - here, 0) * 20_000
    pull = choose_pull(
        prompt,
        here,
        there,
        wait_ns=wait_ns,
        prefill_ns=linear_ns,
        num_bytes=num_bytes,
        link=link,
        ns_per_byte=ns_per_byte,
        settings=PullSettings(0.0, margin_ns),
    )
    if pull is None:
        return
    assert wait_ns is not None
    assert pull.num_tokens == there - here > 0
    recomputed = wait_ns + linear_ns(prompt - here)
    pulled = max(wait_ns, pull.arrival_ns) + linear_ns(prompt - there)
    assert pulled + num_bytes * ns_per_byte + margin_ns < recomputed


def test_the_crossover_is_where_the_bytes_take_as_long_as_the_compute() -> None:
    # 10,000 tokens of 20 kB are 200 MB; computing them takes 1 s: 1.6 Gbit/s is the crossover.
    def pulls(bits_per_s: float) -> bool:
        found = choose_pull(
            12_000,
            0,
            10_000,
            wait_ns=0,
            prefill_ns=linear_ns,
            num_bytes=200_000_000,
            link=LinkState(bits_per_s),
            settings=PullSettings(0.0, 0),
        )
        return found is not None

    assert pulls(1.61e9)
    assert not pulls(1.59e9)


def test_a_pull_hides_behind_the_queue_and_a_backlog_delays_it() -> None:
    def pulls(wait_ns: int, backlog_bytes: int) -> bool:
        found = choose_pull(
            12_000,
            0,
            10_000,
            wait_ns=wait_ns,
            prefill_ns=linear_ns,
            num_bytes=200_000_000,
            link=LinkState(1e9, backlog_bytes),
        )
        return found is not None

    assert not pulls(0, 0)
    assert pulls(2 * NS_PER_S, 0)
    assert not pulls(2 * NS_PER_S, 500_000_000)


def test_what_decode_adds_is_in_both_local_predictions() -> None:
    costs = Costs([MS * n for n in range(3)], [MS * n for n in range(3)], [0, 1, 2], 0, 1000)
    facts = RoutingFacts(2000, 0, 1000)
    local, signals = [], PathSignals(0, 0, LinkState(1e9))
    for waits in (DecodeWait(), DecodeWait(2**62, NS_PER_S)):
        plain = predict(facts, signals, costs, waits)
        found = with_pull(plain, facts, signals, costs, 0.0, waits)
        assert found.pull_tokens == 1000
        assert plain.local_ns is not None
        assert found.local_ns is not None
        assert plain.local_ns - found.local_ns == NS_PER_S - 8 * 1000
        local.append(found.local_ns)
    assert local[1] - local[0] == NS_PER_S


MISSES = st.lists(
    st.tuples(
        st.integers(0, 12),
        st.integers(1, 50),
        st.integers(0, 30 * NS_PER_S),
        st.integers(0, 5 * NS_PER_S),
    ),
    max_size=60,
)


@given(
    misses=MISSES,
    budget=st.integers(0, 5_000),
    link=LINKS,
    worth=WORTHS,
    num_max=st.integers(1, 20),
)
def test_copies_stay_within_the_budget_and_are_worth_their_bytes(
    misses: list[tuple[int, int, int, int]],
    budget: int,
    link: LinkState | None,
    worth: float,
    num_max: int,
) -> None:
    settings = CopySettings(budget, num_candidates_max=num_max)
    hot, now_ns = HotPrefixes(settings), 0
    saved: dict[int, int] = {}
    for key, num_blocks, gap_ns, saved_ns in misses:
        now_ns += gap_ns
        miss(hot, [*range(-num_blocks, -1), key], saved_ns, now_ns)
        saved[key] = max(saved.get(key, 0), saved_ns)
        assert len(hot) <= num_max
    copies = hot.choose(link, now_ns, worth)
    assert sum(copy.num_bytes for copy in copies) <= budget
    for copy in copies:
        assert link is not None
        uses = sum(key == copy.block_ids[-1] for key, *_ in misses)
        cost_ns = copy.num_bytes * (8e9 / link.bits_per_s + worth)
        assert uses >= settings.num_uses_min
        assert uses * saved[copy.block_ids[-1]] > cost_ns
    assert not {copy.block_ids[-1] for copy in copies} & set(hot._demands)


def miss(hot: HotPrefixes[int], block_ids: list[int], saved_ns: int, now_ns: int) -> None:
    size = len(block_ids) * 100
    hot.miss(block_ids, len(block_ids), 0, num_bytes=size, saved_ns=saved_ns, now_ns=now_ns)


def test_counts_halve_in_a_half_life() -> None:
    settings = CopySettings(10**6, half_life_ns=NS_PER_S)
    hot, link = HotPrefixes(settings), LinkState(1e9)
    for _ in range(3):
        miss(hot, [1], NS_PER_S, 0)
    assert not hot.choose(link, NS_PER_S)
    assert [copy.block_ids for copy in hot.choose(link, NS_PER_S // 2)] == [[1]]


def test_of_prefixes_that_begin_alike_one_is_copied_and_its_beginnings_with_it() -> None:
    hot, link = HotPrefixes(CopySettings(10**6)), LinkState(1e9)
    for block_ids, saved_ns in (([1], 1), ([1, 2, 3], 3), ([1, 2, 3, 4], 2), ([1, 9], 1)):
        for _ in range(3):
            miss(hot, block_ids, saved_ns * NS_PER_S, 0)
    assert [copy.block_ids for copy in hot.choose(link, 0)] == [[1, 2, 3], [1, 9]]
    # The longer one is left for the next interval; what lies before it is no demand any more.
    assert [copy.block_ids for copy in hot.choose(link, 0)] == [[1, 2, 3, 4]]
    assert len(hot) == 0


@given(length=st.integers(0, 200), present=st.integers(0, 200), held=st.integers(0, 200))
def test_marks_are_few_and_beyond_what_is_there(length: int, present: int, held: int) -> None:
    found = list(marks(range(length), present, held))
    assert all(present < mark <= min(held, length) for mark in found)
    assert len(found) <= length.bit_length() + 1
    assert len(set(found)) == len(found)
    if min(held, length) > present:
        assert found[-1] == min(held, length)


def test_a_prompt_is_counted_by_link_from_what_is_there_to_what_the_other_pool_has() -> None:
    costs = Costs([n * MS for n in range(200)], [0] * 200, [n * 10 for n in range(200)], 0, 10)
    replication = Replication[int](CopySettings(10**6, num_uses_min=1.0))
    for has_state, link in ((False, ("far", "pd")), (True, ("near", "pd"))):
        prompt = CopiedPrompt(range(10), 105, 10, has_state, lambda final, have: final - have)
        replication.missed(link, prompt, 20, 70, costs, 0)
    assert [*replication.links] == [("far", "pd"), ("near", "pd")]
    # A beginning that is short of what the pool has is of use without linear state alone.
    counted = [replication._hot[link]._demands for link in replication.links]
    assert [sorted(demands) for demands in counted] == [[3, 6], [6]]
    for link in replication.links:
        (copy,) = replication.choose(link, LinkState(1e9), 0.0, 0)
        assert (list(copy.block_ids), copy.num_present, copy.num_bytes) == ([*range(7)], 2, 50)


def test_bytes_that_cost_more_than_they_save_are_not_copied() -> None:
    costs = Costs([n * MS for n in range(200)], [0] * 200, [n * 10 for n in range(200)], 0, 10)
    replication = Replication[int](CopySettings(10**6, num_uses_min=1.0))
    prompt = CopiedPrompt(range(10), 105, 10, True, lambda final, have: final - have)
    replication.missed(("far", "pd"), prompt, 20, 70, costs, 0)
    assert not replication.choose(("far", "pd"), LinkState(1e9), 2.0 * MS, 0)
    assert not replication.choose(("far", "pd"), None, 0.0, 0)
    assert replication.choose(("far", "pd"), LinkState(1e9), 0.0, 0)
