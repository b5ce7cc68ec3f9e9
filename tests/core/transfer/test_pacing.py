"""A pacer on a path with a rate and a queue, in steps of a twentieth of a second."""

import itertools

import pytest

from prfaas.core.transfer.pacing import LAN_RTT_NS, RESTART_MAX_NS, SLACK_MAX, Pace, Pacer
from prfaas.units import NS_PER_S

STEP_NS = 50_000_000
RTT_NS, QUEUE_NS = 40_000_000, 20_000_000
GBIT = 10**9


class Path:
    """A path with a rate and a queue; bytes above the rate are queued, or dropped."""

    def __init__(self, rate: int, rtt_ns: int = RTT_NS) -> None:
        self.rate, self.rtt_ns = rate, rtt_ns
        self.queue_ns = 0.0
        self.now_ns = 0
        self.sent = self.dropped = 0.0
        self.restarts = 0
        self.heard: list[tuple[float, float]] = []
        """Counters that the sender knows a round trip later."""

    def carry(self, pacer: Pacer, steps: int) -> list[int]:
        seen = []
        for _ in range(steps):
            offered = min(pacer.bits_per_s * pacer.slack or 10 * self.rate, 10 * self.rate)
            waiting = self.queue_ns + STEP_NS * (offered / self.rate - 1)
            self.queue_ns = min(QUEUE_NS, max(0.0, waiting))
            self.sent += offered
            self.dropped += max(0.0, waiting - QUEUE_NS) / STEP_NS * self.rate
            self.now_ns += STEP_NS
            self.heard.append((self.rate if self.queue_ns else offered, self.queue_ns))
            arriving, queue_ns = self.heard[-1 - (self.rtt_ns - 1) // STEP_NS :][0]
            pace = pacer.sample(self.now_ns, round(arriving), round(self.rtt_ns + queue_ns))
            self.restarts += pace.restart
            seen.append(pace.bits_per_s)
        return seen


def warm(rate: int = GBIT, rtt_ns: int = RTT_NS) -> tuple[Path, Pacer]:
    path, pacer = Path(rate, rtt_ns), Pacer()
    pacer.sample(0, rate // 10, rtt_ns)
    path.carry(pacer, 30)
    return path, pacer


@pytest.mark.parametrize("rtt_ms", [40, 100, 200])
def test_a_link_without_a_budget_fills_the_path_and_drops_next_to_nothing(rtt_ms: int) -> None:
    path, pacer = warm(rtt_ns=rtt_ms * 10**6)
    path.carry(pacer, 100)
    path.sent = path.dropped = 0
    ceilings = path.carry(pacer, 200)
    assert sum(ceilings) / len(ceilings) > 0.93 * GBIT
    assert path.dropped / path.sent < 0.01


def test_a_path_that_gets_slower_and_fast_again_is_followed_within_a_second() -> None:
    path, pacer = warm()
    path.rate = GBIT // 10
    assert path.carry(pacer, 10)[-1] < 1.2 * path.rate
    path.carry(pacer, 20)
    path.rate = GBIT
    assert path.carry(pacer, 20)[-1] > 0.7 * GBIT


@pytest.mark.parametrize("rate", [GBIT, GBIT // 7, 68_000_001, 12_345_679])
def test_a_link_never_stays_below_where_it_found_a_queue(rate: int) -> None:
    path, pacer = warm(rate)
    path.rate = 10 * rate
    assert path.carry(pacer, 40)[-1] > 5 * rate


def test_a_budget_is_a_ceiling_and_a_slower_path_is_still_found() -> None:
    path, pacer = Path(GBIT), Pacer(GBIT // 2)
    assert set(path.carry(pacer, 50)) == {GBIT // 2}
    path.rate = GBIT // 10
    assert path.carry(pacer, 20)[-1] < 1.2 * path.rate


def test_a_longer_path_is_not_taken_for_a_queue() -> None:
    path, pacer = warm()
    path.rtt_ns *= 2
    assert min(path.carry(pacer, 100)[50:]) > 0.6 * GBIT


@pytest.mark.parametrize("rtt_ns", [0, LAN_RTT_NS // 4])
def test_a_local_path_is_not_paced(rtt_ns: int) -> None:
    pacer = Pacer()
    for step in range(20):
        assert pacer.sample(step * STEP_NS, GBIT, rtt_ns and rtt_ns * (1 + step)) == Pace(0)


def test_congestion_control_that_remembers_a_slower_path_is_started_anew_ever_more_rarely() -> None:
    path, pacer = warm()
    restarts = []
    for step in range(1200):
        path.now_ns += STEP_NS
        if pacer.sample(path.now_ns, GBIT // 4, RTT_NS).restart:
            restarts.append(step)
    gaps = [later - earlier for earlier, later in itertools.pairwise(restarts)]
    assert restarts[0] == 2
    assert gaps == sorted(gaps)
    assert gaps[-1] * STEP_NS >= RESTART_MAX_NS


def test_a_full_path_is_left_alone() -> None:
    path, pacer = warm()
    path.carry(pacer, 100)
    assert not path.restarts


def test_a_restart_is_asked_for_once_though_no_measurement_follows() -> None:
    path, pacer = warm()
    slow = [pacer.sample(path.now_ns + n * STEP_NS, GBIT // 4, RTT_NS).restart for n in (1, 2, 3)]
    assert slow == [False, False, True]
    near = path.now_ns + 4 * STEP_NS
    assert not pacer.sample(near, GBIT // 4, 0).restart
    assert not pacer.sample(near + STEP_NS, GBIT, LAN_RTT_NS // 2).restart


def test_shares_go_up_while_less_arrives_and_never_far() -> None:
    _, pacer = warm()
    assert pacer.slack < 1.1
    for step in range(10):
        pacer.sample(10**10 + step * STEP_NS, round(0.85 * pacer.bits_per_s), RTT_NS)
    assert 1.1 < pacer.slack <= SLACK_MAX


def test_one_low_sample_after_a_high_one_is_no_collapse() -> None:
    """A segment that was missing is acknowledged with all that came after it."""
    _, pacer = warm()
    before = pacer.bits_per_s
    for step, rate in enumerate((0.9, 1.4, 0.4, 0.9)):
        pacer.sample(10**10 + step * STEP_NS, round(rate * GBIT), RTT_NS + 4_000_000)
    assert pacer.bits_per_s > 0.8 * before


BBR_WINDOW_NS = 10 * NS_PER_S
"""A connection under BBR pauses when its shortest round trip is older."""


@pytest.mark.parametrize("num_connections", [1, 4, 16])
def test_each_connection_is_renewed_before_bbr_pauses_it(num_connections: int) -> None:
    _, pacer = warm()
    times = range(10 * NS_PER_S, 40 * NS_PER_S, STEP_NS)
    arriving = round(0.95 * pacer.bits_per_s)
    paces = [pacer.sample(now_ns, arriving, RTT_NS, num_connections) for now_ns in times]
    renewed = [now_ns for now_ns, pace in zip(times, paces, strict=True) if pace.renew]
    turns = zip(renewed, renewed[num_connections:], strict=False)
    assert 0 < max(later - earlier for earlier, later in turns) < 0.9 * BBR_WINDOW_NS
    assert len(renewed) < 5 * num_connections


def test_nothing_is_renewed_without_a_ceiling_or_in_front_of_a_queue() -> None:
    """Restarted without a ceiling, congestion control fills the path until it drops; with a queue
    the pause shows how long the path is."""
    times = range(STEP_NS, 9 * NS_PER_S, STEP_NS)
    free, queued = Pacer(), Pacer(GBIT)
    assert not any(free.sample(now_ns, GBIT, RTT_NS).renew for now_ns in times)
    queued.sample(0, GBIT, RTT_NS)
    assert not any(queued.sample(now_ns, GBIT // 2, RTT_NS + QUEUE_NS).renew for now_ns in times)


def test_a_queue_that_one_cut_does_not_drain_is_still_a_queue() -> None:
    """Bytes that a lost segment held back were counted at once, and the cut was too small."""
    path, pacer = warm()
    path.queue_ns = QUEUE_NS
    path.now_ns += NS_PER_S
    pacer.sample(path.now_ns, round(1.2 * GBIT), path.rtt_ns + QUEUE_NS)
    path.sent = path.dropped = 0
    path.carry(pacer, 100)
    assert path.dropped / path.sent < 0.02
