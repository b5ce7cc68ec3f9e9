"""The load book against instances that work first come first served."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import example, given
from hypothesis import strategies as st

from prfaas.core.dispatch.instance_load import InstanceLoad
from prfaas.core.dispatch.scoring import Candidate, pick
from prfaas.units import NS_PER_S

NAMES = ["a", "b", "c"]
FOR_EVER = 10**15


@dataclass
class Queue:
    """One instance: jobs that run one after the other, each as long as it was said to take."""

    now_ns: int = 0
    jobs: list[tuple[int, int]] = field(default_factory=list)
    """Job and work that is left."""

    def pass_to(self, now_ns: int) -> list[tuple[int, int]]:
        """Jobs that end until then, and when."""
        ended = []
        while self.jobs and self.now_ns + self.jobs[0][1] <= now_ns:
            job, left = self.jobs.pop(0)
            self.now_ns += left
            ended.append((job, self.now_ns))
        if self.jobs:
            job, left = self.jobs[0]
            self.jobs[0] = (job, left - (now_ns - self.now_ns))
        self.now_ns = now_ns
        return ended

    @property
    def num_waiting(self) -> int:
        return max(0, len(self.jobs) - 1)

    @property
    def backlog_ns(self) -> int:
        return sum(left for _, left in self.jobs)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["dispatch", "dispatch", "report", "look", "late report", "drop"]),
        st.sampled_from(NAMES),
        st.integers(1, 3 * NS_PER_S),
        st.integers(1, 5 * NS_PER_S),
    ),
    max_size=40,
)
"""Action, instance, time since the last step, and work. No two steps are at one instant: a report
of an instant counts what was sent at it."""


@given(steps=STEPS, hears_ends=st.booleans())
@example(
    steps=[
        ("dispatch", "a", 1, 2),
        ("dispatch", "a", 1, 1),
        ("drop", "a", 0, 1),
        ("late report", "a", 0, 1),
    ],
    hears_ends=True,
)
def test_waits_are_those_of_queues_that_work_as_they_should(
    steps: list[tuple[str, str, int, int]], hears_ends: bool
) -> None:
    book, queues, now = InstanceLoad(NAMES, FOR_EVER), {n: Queue() for n in NAMES}, 0
    seen = dict.fromkeys(NAMES, (0, 0))
    for number, (action, name, after, work) in enumerate(steps):
        now += after
        for each, queue in queues.items():
            for job, at_ns in queue.pass_to(now):
                if hears_ends:
                    book.done(each, job, at_ns)
        queue = queues[name]
        if action == "dispatch":
            book.dispatch(name, number, now, work)
            queue.jobs.append((number, work))
        elif action == "report":
            book.report(name, now, queue.num_waiting)
        elif action == "look":
            seen[name] = now, queue.num_waiting
        elif action == "late report":
            book.report(name, *seen[name])
        elif len(queue.jobs) > 1:
            job, _ = queue.jobs.pop()
            book.drop(name, job, now)
        for each in NAMES:
            wait_ns, backlog_ns = book.wait_ns(each, now), queues[each].backlog_ns
            assert wait_ns is not None
            # What nobody has heard the end of may still be there.
            assert wait_ns == backlog_ns if hears_ends else wait_ns >= backlog_ns


@given(steps=STEPS)
def test_the_order_is_that_of_the_waits_and_the_picker_takes_the_first(
    steps: list[tuple[str, str, int, int]],
) -> None:
    book, ready, now = InstanceLoad(NAMES, FOR_EVER), dict.fromkeys(NAMES, True), 0
    for number, (action, name, after, work) in enumerate(steps):
        now += after
        if action == "dispatch":
            book.dispatch(name, number, now, work)
        elif action == "report":
            book.report(name, now, work % 4)
        else:
            ready[name] = not ready[name]
            book.set_ready(name, ready=ready[name], now_ns=now)
        waits = {n: book.wait_ns(n, now) for n in NAMES}
        found_order = list(book.in_order(now))
        order = [name for name, _ in found_order]
        assert [wait_ns for _, wait_ns in found_order] == [waits[name] for name in order]
        assert sorted(order) == [n for n in NAMES if ready[n]]
        assert [waits[n] for n in order] == sorted(waits[n] or 0 for n in order)
        first = book.first(now)
        assert first == (found_order[0] if order else None)
        found = pick((Candidate(n, wait_ns=waits[n]) for n in order), 1, hit_tokens_max=0)
        assert (found.candidate.name if found.candidate else None) == (first and first[0])


def test_a_late_report_does_not_forget_what_was_sent_since() -> None:
    book = InstanceLoad(["a"], stale_after_ns=5 * NS_PER_S)
    book.dispatch("a", 1, 2 * NS_PER_S, 3 * NS_PER_S)
    book.report("a", NS_PER_S, 0)
    assert book.wait_ns("a", 2 * NS_PER_S) == 3 * NS_PER_S
    assert book.wait_ns("a", 8 * NS_PER_S) is None


def test_an_instance_that_is_slower_than_thought_is_not_free() -> None:
    book = InstanceLoad(["a"], FOR_EVER)
    for job in range(3):
        book.dispatch("a", job, 0, NS_PER_S)
    # After 10 s still two wait behind the first, of which nobody knows how much is left.
    book.report("a", 10 * NS_PER_S, 2)
    assert book.wait_ns("a", 10 * NS_PER_S) == 2 * NS_PER_S
    book.done("a", 0, 12 * NS_PER_S)
    assert book.wait_ns("a", 12 * NS_PER_S) == 2 * NS_PER_S


def test_an_instance_that_is_faster_than_thought_is_found_out() -> None:
    book = InstanceLoad(["a"], FOR_EVER)
    for job in range(3):
        book.dispatch("a", job, 0, 10 * NS_PER_S)
    book.report("a", NS_PER_S, 0)
    assert book.wait_ns("a", NS_PER_S) == 10 * NS_PER_S
    book.done("a", 2, 2 * NS_PER_S)
    assert book.wait_ns("a", 2 * NS_PER_S) == 0


def test_what_others_sent_counts_until_it_is_gone() -> None:
    book = InstanceLoad(["a", "b"], FOR_EVER)
    book.dispatch("a", 1, 0, 2 * NS_PER_S)
    book.report("a", NS_PER_S, 4)
    assert book.wait_ns("a", NS_PER_S) == (1 + 3 * 2) * NS_PER_S
    assert book.first(NS_PER_S) == ("b", 0)
    book.report("a", 2 * NS_PER_S, 0)
    assert book.wait_ns("a", 2 * NS_PER_S) == 0


def test_a_job_that_ended_between_report_and_its_arrival_is_not_taken_for_another_s() -> None:
    book = InstanceLoad(["a"], FOR_EVER)
    book.dispatch("a", 1, 0, NS_PER_S)
    book.dispatch("a", 2, 0, NS_PER_S)
    book.done("a", 1, 2 * NS_PER_S)
    book.done("a", 2, 3 * NS_PER_S)
    book.report("a", NS_PER_S, 1)
    assert book.wait_ns("a", 3 * NS_PER_S) == 0


def test_outdated_entries_do_not_pile_up() -> None:
    book = InstanceLoad(["a", "b"], FOR_EVER)
    for job in range(10_000):
        book.dispatch("b", job, job, 1)
        book.done("b", job, job + 1)
    assert len(book.order) <= 3 * 10
