from dataclasses import replace

import pytest

from prfaas.gateway.console.alarms import Alarm, Facts, Severity, alarms
from prfaas.gateway.console.history import History, HistorySample, LinkSample
from prfaas.gateway.telemetry.metrics import Totals

LINK = "far>near"
GBIT = 10**9
WELL = Facts((), (), {}, num_long=0, num_decided=0, expected_bits_per_s={})
CARRIES = LinkSample(
    up=True,
    goodput_bits_per_s=900_000_000,
    rtt_ms=40.0,
    queued_bytes=1,
    in_flight_bytes=0,
    offload_threshold=1000,
)
QUIET = HistorySample(0.0, Totals(0, 0, 0, 0, 0, {}), {LINK: CARRIES})


def after(kv_bytes: int = 0, **counts: int) -> HistorySample:
    """A sample with these counts since the quiet one."""
    moved = {("far", "near"): kv_bytes}
    return replace(QUIET, totals=replace(QUIET.totals, link_bytes=moved, **counts))


def heard(*samples: HistorySample, facts: Facts = WELL) -> list[Alarm]:
    """Alarms at the last of some samples, a second apart."""
    past = History()
    *before, latest = (replace(s, at_unix_s=float(second)) for second, s in enumerate(samples))
    for sample in before:
        past.add(sample)
    return alarms(past, latest, facts)


def names(*samples: HistorySample, facts: Facts = WELL) -> list[str]:
    return [alarm.name for alarm in heard(*samples, facts=facts)]


def test_all_is_well() -> None:
    assert names(QUIET, QUIET) == []


def test_parts_that_are_gone_come_first() -> None:
    facts = replace(
        WELL, missing_engines=("e",), silent_pools=("p",), index_states={"p": "degraded", "q": "x"}
    )
    found = heard(QUIET, facts=facts)
    assert [(a.name, a.subject) for a in found] == [
        ("engine_down", "e"),
        ("pool_silent", "p"),
        ("index_incomplete", "q"),
    ]
    assert [a.severity for a in found][:2] == [Severity.CRITICAL] * 2


def test_an_engine_that_its_pool_node_does_not_know_is_an_alarm() -> None:
    [found] = heard(QUIET, facts=replace(WELL, detached_engines={"pd-1": "pd-pool"}))
    assert (found.name, found.subject) == ("engine_detached", "pd-1")
    assert "pd-pool" in found.text


@pytest.mark.parametrize(("factor", "expected"), [(0.4, 1), (0.6, 0), (1.0, 0), (1.9, 0), (2.1, 1)])
def test_a_plan_that_does_not_fit_is_an_alarm_in_both_directions(
    factor: float, expected: int
) -> None:
    facts = replace(WELL, corrections={"local path of pd": factor})
    assert names(QUIET, facts=facts) == ["predictions_off"] * expected
    [refuted] = heard(QUIET, facts=replace(facts, refuted=["local path of pd"]))
    assert "does not use them" in refuted.text


@pytest.mark.parametrize(("factor", "expected"), [(0.01, 1), (0.6, 0), (1.0, 0), (100.0, 1)])
def test_a_plan_with_the_bytes_of_another_model_is_an_alarm(factor: float, expected: int) -> None:
    assert names(QUIET, facts=replace(WELL, bytes_correction=factor)) == (
        ["plan_bytes_off"] * expected
    )


def test_an_engine_whose_blocks_differ_is_named_with_the_fact() -> None:
    words = "dtype: bfloat16 at near, float16 at far"
    [found] = heard(QUIET, facts=replace(WELL, mismatches={"far": words}))
    assert (found.name, found.subject, found.severity) == (
        "layout_mismatch",
        "far",
        Severity.CRITICAL,
    )
    assert words in found.text


def test_a_link_that_is_down() -> None:
    assert names(replace(QUIET, links={LINK: replace(CARRIES, up=False)})) == ["link_down"]


@pytest.mark.parametrize(("num_slow", "expected"), [(2, []), (3, ["link_slow"])])
def test_a_link_is_slow_after_three_busy_seconds(num_slow: int, expected: list[str]) -> None:
    slow = replace(QUIET, links={LINK: replace(CARRIES, goodput_bits_per_s=90_000_000)})
    assert names(QUIET, *[slow] * num_slow) == expected


def test_an_idle_link_is_not_slow() -> None:
    idle = replace(CARRIES, goodput_bits_per_s=1000, queued_bytes=0)
    assert names(QUIET, *[replace(QUIET, links={LINK: idle})] * 5) == []


def test_a_budget_says_what_a_link_is_to_carry() -> None:
    facts = replace(WELL, expected_bits_per_s={LINK: 2.0 * GBIT})
    found = heard(*[QUIET] * 3, facts=facts)
    assert [a.name for a in found] == ["link_slow"]
    assert "900 Mbit/s of 2.00 Gbit/s" in found[0].text


@pytest.mark.parametrize(
    ("num_long", "num_remote", "expected"),
    [(8, 0, ["nothing_offloaded"]), (7, 0, []), (8, 1, [])],
)
def test_nothing_is_offloaded_although_much_is_long(
    num_long: int, num_remote: int, expected: list[str]
) -> None:
    facts = replace(WELL, num_long=num_long, num_decided=20)
    assert names(QUIET, after(num_remote=num_remote), facts=facts) == expected


def test_offloaded_requests_that_moved_nothing() -> None:
    assert names(QUIET, after(num_remote=5)) == ["no_kv_bytes"]
    assert names(QUIET, after(1, num_remote=5)) == []


def test_many_fallbacks_and_refusals() -> None:
    many = after(1, num_remote=20, num_local=20, num_fallbacks=3, num_refused=3)
    assert names(QUIET, many) == ["fallbacks", "refusals"]
    few = after(1, num_remote=20, num_local=20, num_fallbacks=2, num_refused=2)
    assert names(QUIET, few) == []


def test_the_history_forgets_the_oldest() -> None:
    past = History(samples_max=3)
    for second in range(5):
        past.add(replace(QUIET, at_unix_s=float(second)))
    assert [sample.at_unix_s for sample in past.since(0.0)] == [2.0, 3.0, 4.0]
    assert [sample.at_unix_s for sample in past.since(3.5)] == [4.0]
