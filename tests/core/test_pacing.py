"""A pacer on a path with a rate and a queue, in steps of a tenth of a second."""

import pytest

from prfaas.core.pacing import LAN_RTT_NS, Pacer

STEP_NS = 100_000_000
RTT_NS, QUEUE_NS = 40_000_000, 20_000_000
GBIT = 10**9


class Path:
    """What goes over it above its rate waits in its queue, or is dropped there."""

    def __init__(self, rate: int, rtt_ns: int = RTT_NS) -> None:
        self.rate, self.rtt_ns = rate, rtt_ns
        self.queue_ns = 0.0
        self.now_ns = 0
        self.sent = self.dropped = 0.0

    def carry(self, pacer: Pacer, steps: int) -> list[int]:
        seen = []
        for _ in range(steps):
            offered = min(pacer.bits_per_s or 10 * self.rate, 10 * self.rate)
            waiting = self.queue_ns + STEP_NS * (offered / self.rate - 1)
            self.queue_ns = min(QUEUE_NS, max(0.0, waiting))
            self.sent += offered
            self.dropped += max(0.0, waiting - QUEUE_NS) / STEP_NS * self.rate
            self.now_ns += STEP_NS
            arriving = self.rate if self.queue_ns else offered
            pacer.sample(self.now_ns, round(arriving), round(self.rtt_ns + self.queue_ns))
            seen.append(pacer.bits_per_s)
        return seen


def warm(rate: int = GBIT) -> tuple[Path, Pacer]:
    path, pacer = Path(rate), Pacer()
    pacer.sample(0, rate // 10, RTT_NS)
    path.carry(pacer, 30)
    return path, pacer


def test_a_link_without_a_budget_fills_the_path_and_drops_next_to_nothing() -> None:
    path, pacer = warm()
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
    assert path.carry(pacer, 14)[-1] > 0.7 * GBIT


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
        assert pacer.sample(step * STEP_NS, GBIT, rtt_ns and rtt_ns * (1 + step)) == 0
