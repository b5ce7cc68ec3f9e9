"""Fair queueing between sites: shares, no credit for idling, rates, and what comes back."""

from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.admission.contracts import Contract
from prfaas.core.sharing.engine_queue import LAG_MAX, SPEED_UNKNOWN, EngineQueue, QueueRefusal
from prfaas.units import NS_PER_S


def contract(
    site: str, share: float, tokens_per_s: int | None = None, queued_max: int = 256
) -> Contract:
    return Contract(site, share, frozenset({f"{site}-gateway"}), {}, tokens_per_s, queued_max)


class Bench:
    """Engines that take as long as a request has tokens, and sites that always want more.

    Args:
        shares: By site.
        slots: By engine.
    """

    def __init__(self, shares: Mapping[str, float], slots: Mapping[str, int]) -> None:
        self.queue = EngineQueue(slots)
        self.queue.agree(contract(site, share) for site, share in shares.items())
        self.jobs: dict[int, tuple[str, str, int]] = {}
        self.done: dict[str, int] = dict.fromkeys(shares, 0)
        self._running: list[tuple[int, int]] = []
        self.now = 0

    def ask(self, site: str, engine: str, tokens: int) -> QueueRefusal | None:
        job = len(self.jobs)
        self.jobs[job] = site, engine, tokens
        return self.queue.ask(job, site, engine, tokens)

    def step(self, computed: int | None = None) -> str:
        """Start what may start, and end the request that is over first."""
        for job in self.queue.start(self.now):
            self._running.append((self.now + self.jobs[job][2], job))
        self._running.sort()
        self.now, job = self._running.pop(0)
        site, _, tokens = self.jobs[job]
        self.done[site] += tokens if computed is None else computed
        self.queue.leave(job, computed, self.now)
        return site


def kept_full(bench: Bench, wants: Mapping[str, Iterable[tuple[str, int]]], steps: int) -> None:
    """Run with requests of every site waiting at all times."""
    for site, requests in wants.items():
        for engine, tokens in requests:
            assert bench.ask(site, engine, tokens) is None
    again = {site: list(requests) for site, requests in wants.items()}
    turns = dict.fromkeys(wants, 0)
    for _ in range(steps):
        site = bench.step()
        engine, tokens = again[site][turns[site] % len(again[site])]
        turns[site] += 1
        assert bench.ask(site, engine, tokens) is None


@given(
    share=st.floats(0.1, 0.9),
    sizes=st.lists(st.integers(100, 20_000), min_size=1, max_size=8),
    crowd=st.integers(2, 10),
)
def test_shares_of_tokens_are_those_of_the_contracts(
    share: float, sizes: list[int], crowd: int
) -> None:
    """Whatever the sizes, and however many requests one of them has waiting."""
    bench = Bench({"a": share, "b": 1 - share}, {"e": 1})
    flood = [("e", size) for size in sizes for _ in range(crowd)]
    kept_full(bench, {"a": flood, "b": [("e", 3000), ("e", 3000)]}, 500)
    total = sum(bench.done.values())
    largest = max(*sizes, 3000)
    # Off by two requests at most, whatever the time.
    assert abs(bench.done["a"] - share * total) <= 2 * largest


def test_a_site_that_wants_one_of_two_engines_gets_its_share_of_both() -> None:
    bench = Bench({"a": 0.5, "b": 0.5}, {"e0": 1, "e1": 1})
    kept_full(bench, {"a": [("e0", 1000), ("e1", 1000)] * 4, "b": [("e1", 1000)] * 4}, 2000)
    assert abs(bench.done["b"] / sum(bench.done.values()) - 0.5) < 0.01


def test_a_site_that_could_not_use_its_share_takes_little_of_it_later() -> None:
    """With 0.9 it wants one of two engines for long, and then both."""
    bench = Bench({"a": 0.1, "b": 0.9}, {"e0": 1, "e1": 1})
    kept_full(bench, {"a": [("e0", 10_000)] * 2, "b": [("e1", 10_000)] * 2}, 2000)
    assert bench.done["a"] == bench.done["b"]
    bench.done = {"a": 0, "b": 0}
    kept_full(bench, {"a": [("e0", 10_000)] * 2, "b": [("e0", 10_000)] * 2}, 2000)
    assert 0.1 * 20_000_000 - LAG_MAX <= bench.done["a"] <= 0.1 * 20_000_000


def test_an_idle_site_has_no_credit_and_one_that_is_alone_gets_everything() -> None:
    bench = Bench({"a": 0.1, "b": 0.9}, {"e": 1})
    for _ in range(100):
        bench.ask("a", "e", 1000)
        assert bench.step() == "a"
    kept_full(bench, {"a": [("e", 1000)], "b": [("e", 1000)] * 2}, 1000)
    # As if the hundred requests before had not been.
    assert abs(bench.done["b"] - 900_000) <= 2000


def test_cached_tokens_are_given_back() -> None:
    """Both send the same prompts, a's are cached by nine tenths: it may have ten times as many."""
    queue = EngineQueue({"e": 1})
    queue.agree([contract("a", 1.0), contract("b", 1.0)])
    counts = {"a": 0, "b": 0}
    sites: dict[int, str] = {}

    def ask(site: str) -> None:
        sites[len(sites)] = site
        assert queue.ask(len(sites) - 1, site, "e", 1000) is None

    for site in "aabb":
        ask(site)
    for _ in range(1100):
        [job] = queue.start(0)
        site = sites[job]
        counts[site] += 1
        queue.leave(job, 100 if site == "a" else 1000, 0)
        ask(site)
    assert 9 < counts["a"] / counts["b"] < 11


def test_a_rate_holds_on_idle_engines_too() -> None:
    queue = EngineQueue({"e": 1})
    queue.agree([contract("a", 1.0, tokens_per_s=100)])
    now, done = 0, 0
    for job in range(200):
        assert queue.ask(job, "a", "e", 50) is None
        while not (started := queue.start(now)):
            wait_ns = queue.wait_ns(now)
            assert wait_ns
            now += wait_ns
        done += 50
        queue.leave(started[0], None, now)
    # 10 seconds' worth at once, and the last request is in debt.
    assert done <= 100 * now / NS_PER_S + 1000 + 50
    assert done >= 100 * now / NS_PER_S


def test_a_full_queue_and_a_stranger_are_refused() -> None:
    queue = EngineQueue({"e": 1})
    queue.agree([contract("a", 1.0, queued_max=2)])
    assert [queue.ask(job, "a", "e", 1) for job in range(3)] == [
        None,
        None,
        QueueRefusal.QUEUE_FULL,
    ]
    assert queue.ask(9, "b", "e", 1) is QueueRefusal.NO_CONTRACT


def test_requests_of_a_site_without_a_contract_end_and_free_their_slots() -> None:
    queue = EngineQueue({"e": 1})
    queue.agree([contract("a", 1.0), contract("b", 1.0)])
    for job, site in enumerate("aab"):
        queue.ask(job, site, "e", 10)
    assert queue.start(0) == [0]
    assert queue.agree([contract("b", 1.0)]) == [0, 1]
    for job in (0, 1):
        queue.leave(job, None, 0)
    assert queue.start(0) == [2]
    assert (queue.running_of("b", "e"), queue.waiting_of("a", "e")) == (1, 0)


def test_requests_that_leave_while_they_wait_cost_nothing() -> None:
    queue = EngineQueue({"e": 1})
    queue.agree([contract("a", 1.0), contract("b", 1.0)])
    queue.ask(0, "b", "e", 10)
    queue.start(0)
    for job in range(1, 50):
        queue.ask(job, "a", "e", 10_000)
        queue.leave(job, None, 0)
    queue.ask(50, "a", "e", 10)
    queue.ask(51, "b", "e", 10)
    queue.leave(0, None, 0)
    assert queue.start(0) == [50]
    assert queue.num_waiting("a") == 0


def longest_run(queue: EngineQueue, asked: Iterable[str], site: str, first_job: int) -> int:
    """Tokens of a site in a row at engine "e", while all that asked always want more."""
    sites: dict[int, str] = {}
    running: list[int] = []

    def ask(name: str) -> None:
        job = first_job + len(sites)
        sites[job] = name
        assert queue.ask(job, name, "e", 20_000) is None

    for name in asked:
        ask(name)
    longest = now = 0
    for _ in range(400):
        running.extend(job for job in queue.start(0) if job in sites)
        job = running.pop(0)
        now = now + 20_000 if sites[job] == site else 0
        longest = max(longest, now)
        ask(sites[job])
        queue.leave(job, 20_000, 0)
    return longest


@pytest.mark.parametrize("holds", ["a site over its rate", "a request elsewhere", "one here"])
def test_no_site_gathers_credit_while_it_wants_little(holds: str) -> None:
    """While a does ten million tokens alone at an engine; then b comes with all it has."""
    queue = EngineQueue({"e": 2, "f": 1})
    limited = contract("r", 1.0, tokens_per_s=1)
    queue.agree([contract("a", 1.0, queued_max=999), contract("b", 1.0, queued_max=999), limited])
    if holds == "a site over its rate":
        for job in (0, 1):
            assert queue.ask(job, "r", "e", 100) is None
        assert queue.start(0) == [0]
        queue.leave(0, 100, 0)
    elif holds == "a request elsewhere":
        assert queue.ask(0, "b", "f", 16) is None
        assert queue.start(0) == [0]
    else:
        assert queue.ask(0, "b", "e", 16) is None
        assert queue.start(0) == [0]
    for job in range(10, 510):
        assert queue.ask(job, "a", "e", 20_000) is None
        assert queue.start(0) == [job]
        queue.leave(job, 20_000, 0)
    # A third of LAG_MAX is b's, as the sum of the shares is three times its own.
    limit = 3 * 20_000 + (LAG_MAX / 3 if holds == "one here" else 0)
    assert longest_run(queue, "aaaa" + "b" * 40, "b", 1000) <= limit


@pytest.mark.parametrize("known", [True, False])
def test_a_request_that_keeps_a_slot_is_charged_for_its_time(known: bool) -> None:
    """Three prompts of 16 tokens wait for what never comes, and their gateway leaves."""
    queue = EngineQueue({"e": 1})
    queue.agree([contract("a", 1.0), contract("b", 1.0)])
    now, speed = 0, int(SPEED_UNKNOWN)
    if known:
        queue.ask(0, "b", "e", 10_000)
        queue.start(now)
        now, speed = NS_PER_S, 10_000
        queue.leave(0, 10_000, now)
        # A tiny one that took long says nothing about the engine.
        queue.ask(1, "b", "e", 2)
        queue.start(now)
        now += 10 * NS_PER_S
        queue.leave(1, 2, now)
    charged = queue.charged("a")
    for job, can_wait in ((2, True), (3, True), (4, False)):
        queue.ask(job, "a", "e", 16, can_wait=can_wait)
        assert queue.start(now) == [job]
        now += 599 * NS_PER_S
        queue.leave(job, 16 if job == 3 else None, now)
    assert queue.charged("a") - charged >= 3 * 599 * speed


def test_requests_that_are_not_here_yet_have_a_slot_or_a_place() -> None:
    queue = EngineQueue({"e0": 1, "e1": 1})
    queue.agree([contract("a", 1.0, queued_max=2)])
    assert queue.refuses("b", {}) is QueueRefusal.NO_CONTRACT
    assert queue.refuses("a", {"e0": 3, "e1": 1}) is None
    assert queue.refuses("a", {"e0": 3, "e1": 2}) is QueueRefusal.QUEUE_FULL
    assert queue.refuses("a", {"e0": 4}) is QueueRefusal.QUEUE_FULL
    assert queue.ask(0, "a", "e0", 100) is None
    assert queue.start(0) == [0]
    assert queue.refuses("a", {"e0": 2}) is None
    assert queue.refuses("a", {"e0": 3}) is QueueRefusal.QUEUE_FULL
