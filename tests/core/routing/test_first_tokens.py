"""Observed first tokens keep a prompt at home where offloading only adds work."""

from __future__ import annotations

import pytest

from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.types import (
    Arrival,
)
from prfaas.core.routing.calibration import CalibrationSettings
from prfaas.core.routing.decision import Path, Reason
from prfaas.core.routing.observed import PACE, UNSEEN_RATIO, ComparedPaths, FirstTokens, NominalWork
from prfaas.units import NS_PER_S
from tests.core.lone_requests import arrive, serve, two_instances

WORK = 10**9
STALE_NS = CalibrationSettings().stale_after_ns


def seen(local: float | None, remote: float | None, count: int = PACE.num_min) -> FirstTokens:
    """First tokens of both paths after so many times their nominal work; the last one at time 0."""
    found = FirstTokens("pd")
    for number in range(count):
        for cluster, factor in (("pd", local), ("far", remote)):
            if factor is not None:
                found.sent(number, cluster, NominalWork(WORK, WORK), -round(factor * WORK))
                found.came(number, 0)
    return found


def compare(
    found: FirstTokens, local: int = 1, remote: int = 1, num_decoding: int = 0, now_ns: int = 0
) -> ComparedPaths | None:
    """With so many prompts at either instance, this one included."""
    return found.sooner_at_local(
        "far",
        NominalWork(WORK, local * WORK),
        NominalWork(WORK, remote * WORK),
        num_decoding,
        now_ns,
    )


def test_a_path_that_is_clearly_slower_is_not_taken() -> None:
    kept = compare(seen(local=1.0, remote=2.0))
    assert kept is not None
    assert kept.local_ns == pytest.approx(WORK, rel=0.01)
    assert kept.remote_ns == pytest.approx(2 * WORK, rel=0.01)
    assert compare(seen(local=1.9, remote=2.0)) is None
    assert compare(seen(local=2.0, remote=1.0)) is None


def test_queues_count_on_both_paths() -> None:
    found = seen(local=2.0, remote=1.0)
    assert compare(found, remote=2) is None
    assert compare(found, remote=3) is not None
    assert compare(found, local=2, remote=3) is None


def test_requests_that_are_decoded_at_home_are_spared() -> None:
    found = seen(local=1.0, remote=2.5)
    assert compare(found, num_decoding=1) is not None
    assert compare(found, num_decoding=2) is None


def test_too_little_overrules_nothing() -> None:
    assert compare(seen(local=1.0, remote=2.0, count=PACE.num_min - 1)) is None
    assert compare(seen(local=1.0, remote=None)) is None


def test_a_home_that_was_not_seen_counts_as_slow() -> None:
    found = seen(local=None, remote=1.0)
    assert compare(found, local=2, remote=2 * round(UNSEEN_RATIO)) is None
    assert compare(found, local=2, remote=2 * round(UNSEEN_RATIO) + 1) is not None


def test_what_is_old_or_contradicts_itself_overrules_nothing() -> None:
    found = seen(local=1.0, remote=2.0)
    assert compare(found, now_ns=STALE_NS) is not None
    assert compare(found, now_ns=STALE_NS + 1) is None
    for number in range(100, 150):
        found.sent(number, "far", NominalWork(WORK, WORK), 0)
        found.came(number, WORK * (100 if number % 2 else 1))
    assert compare(found, now_ns=WORK * 100) is None


def test_what_was_dropped_teaches_nothing() -> None:
    found = FirstTokens("pd")
    for number in range(20):
        found.sent(number, "far", NominalWork(WORK, WORK), 0)
        found.drop(number)
        found.came(number, 9 * WORK)
    assert compare(found) is None


@pytest.fixture
def dispatcher() -> Dispatcher:
    return two_instances(100)


def test_long_prompts_stay_once_first_tokens_have_shown_it(dispatcher: Dispatcher) -> None:
    """3 s for a long prompt away; at home 100 tokens take 0.1 s, so that it would take 1 s."""
    for number in range(PACE.num_min):
        now_ns = 20 * number * NS_PER_S
        serve(dispatcher, 2 * number, 100, now_ns, NS_PER_S // 10)
        found = serve(dispatcher, 2 * number + 1, 1000, now_ns + 5 * NS_PER_S, 3 * NS_PER_S)
        assert found.decision.reason is Reason.ABOVE_THRESHOLD
    now_ns = 20 * PACE.num_min * NS_PER_S
    kept = arrive(dispatcher, 98, 1000, now_ns).decision
    assert (kept.path, kept.reason) == (Path.LOCAL, Reason.FASTER_LOCAL)
    assert kept.predicted_local_ns == pytest.approx(NS_PER_S, rel=0.01)
    assert kept.predicted_remote_ns == pytest.approx(3 * NS_PER_S, rel=0.01)
    # The next ones find a queue at home, and then the remote path is the shorter one.
    assert arrive(dispatcher, 99, 1000, now_ns).decision.path is Path.LOCAL
    assert arrive(dispatcher, 100, 1000, now_ns).decision.path is Path.REMOTE
    assert dispatcher.foresee(Arrival(101, 1000, 0, {}), now_ns).decision.path is Path.LOCAL


def test_a_request_that_left_its_path_teaches_nothing(dispatcher: Dispatcher) -> None:
    for number in range(2 * PACE.num_min):
        now_ns = 20 * number * NS_PER_S
        arrive(dispatcher, number, 1000, now_ns)
        dispatcher.requests.fall_back(number, now_ns)
        dispatcher.requests.prompt_ready(number, now_ns + NS_PER_S)
        dispatcher.requests.end(number, now_ns + NS_PER_S)
    now_ns = 10**6 * NS_PER_S
    assert arrive(dispatcher, 99, 1000, now_ns).decision.reason is Reason.ABOVE_THRESHOLD


def test_streams_at_home_count_until_they_end(dispatcher: Dispatcher) -> None:
    for number in range(PACE.num_min):
        now_ns = 20 * number * NS_PER_S
        serve(dispatcher, 2 * number, 100, now_ns, NS_PER_S // 10)
        serve(dispatcher, 2 * number + 1, 1000, now_ns + 5 * NS_PER_S, 3 * NS_PER_S)
    now_ns = 20 * PACE.num_min * NS_PER_S
    for number in (50, 51):
        arrive(dispatcher, number, 100, now_ns)
    now_ns += NS_PER_S // 10
    for number in (50, 51):
        dispatcher.requests.begun(number, now_ns, is_streamed=True)
        dispatcher.requests.begun(number, now_ns, is_streamed=True)
    asked = Arrival(98, 1000, 0, {})
    assert dispatcher.foresee(asked, now_ns).decision.path is Path.REMOTE
    dispatcher.requests.end(50, now_ns)
    assert dispatcher.foresee(asked, now_ns).decision.path is Path.LOCAL
