from dataclasses import replace

import pytest

from prfaas.gateway.console.history import History, HistorySample, LinkSample
from prfaas.gateway.telemetry.metrics import Totals
from prfaas.incidents.alarm_kinds import Severity
from prfaas.incidents.rules import Alarm, Facts, alarms

LINK = "far>near"
GBIT = 10**9
WELL = Facts()
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
    for second, sample in enumerate(samples):
        past.add(replace(sample, at_unix_s=float(second)))
    return alarms(past, len(samples) - 1.0, facts)


def names(*samples: HistorySample, facts: Facts = WELL) -> list[str]:
    return [alarm.kind.name for alarm in heard(*samples, facts=facts)]


def test_all_is_well() -> None:
    assert names(QUIET, QUIET) == []


def test_parts_that_are_gone_come_first() -> None:
    facts = replace(
        WELL,
        missing_engines={"e": "gone"},
        silent_pools={"p": "silent"},
        index_states={"p": "degraded", "q": "x"},
    )
    found = heard(QUIET, facts=facts)
    assert [(a.kind.name, a.subject) for a in found] == [
        ("engine_down", "e"),
        ("pool_silent", "p"),
        ("index_incomplete", "q"),
    ]
    assert [a.kind.severity for a in found][:2] == [Severity.CRITICAL] * 2


def test_an_engine_that_its_pool_node_does_not_know_is_an_alarm() -> None:
    [found] = heard(QUIET, facts=replace(WELL, detached_engines={"pd-1": "pd-pool"}))
    assert (found.kind.name, found.subject) == ("engine_detached", "pd-1")
    assert "pd-pool" in found.text


@pytest.mark.parametrize(("factor", "expected"), [(0.4, 1), (0.6, 0), (1.0, 0), (1.9, 0), (2.1, 1)])
def test_a_plan_that_does_not_fit_is_an_alarm_in_both_directions(
    factor: float, expected: int
) -> None:
    facts = replace(WELL, corrections={"local path of pd": factor})
    assert names(QUIET, facts=facts) == ["plan_does_not_fit"] * expected
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
    assert (found.kind.name, found.subject, found.kind.severity) == (
        "layout_mismatch",
        "far",
        Severity.CRITICAL,
    )
    assert words in found.text


def test_a_link_that_is_down() -> None:
    assert names(QUIET, facts=replace(WELL, down_links=[LINK])) == ["link_down"]


@pytest.mark.parametrize(("num_slow", "expected"), [(2, []), (3, ["link_slow"])])
def test_a_link_is_slow_after_three_busy_seconds(num_slow: int, expected: list[str]) -> None:
    slow = replace(QUIET, links={LINK: replace(CARRIES, goodput_bits_per_s=90_000_000)})
    assert names(QUIET, *[slow] * num_slow) == expected


def test_an_idle_link_is_not_slow() -> None:
    idle = replace(CARRIES, goodput_bits_per_s=1000, queued_bytes=0)
    assert names(QUIET, *[replace(QUIET, links={LINK: idle})] * 5) == []


def test_a_budget_says_what_a_link_is_to_carry() -> None:
    limited = replace(QUIET, links={LINK: replace(CARRIES, budget_bits_per_s=2 * GBIT)})
    found = heard(*[limited] * 3)
    assert [a.kind.name for a in found] == ["link_slow"]
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
    facts = replace(WELL, refused={"gateway_full": 3})
    assert names(QUIET, many, facts=facts) == ["refusals", "fallbacks"]
    few = after(1, num_remote=20, num_local=20, num_fallbacks=2)
    assert names(QUIET, few) == []


def test_many_failed_requests() -> None:
    assert names(QUIET, facts=replace(WELL, num_ended=100, num_failed=2)) == ["requests_fail"]
    assert names(QUIET, facts=replace(WELL, num_ended=100, num_failed=1)) == []
    assert names(QUIET, facts=replace(WELL, num_ended=19, num_failed=19)) == []


@pytest.mark.parametrize(
    "why",
    [
        "10.0.0.7:7100: certificate verify failed: unable to get local issuer certificate",
        "tlsv1 alert unknown ca",
        "ClientConnectorCertificateError: Hostname mismatch",
    ],
)
def test_a_certificate_that_is_not_accepted_is_named_as_the_cause(why: str) -> None:
    facts = replace(WELL, silent_pools={"p": why}, missing_engines={"e": why})
    found = heard(QUIET, facts=facts)
    assert [alarm.key for alarm in found] == [
        ("certificate_refused", "e"),
        ("certificate_refused", "p"),
    ]
    assert all(why in alarm.text for alarm in found)


def test_breakers_loops_identity_and_the_log_itself() -> None:
    facts = replace(WELL, open_breakers={LINK: "half open"}, frozen_s=3600.0, identity_s=86400.0)
    facts = replace(facts, why_unwritten="the disk is full", has_pd_engine=False)
    found = [alarm.key for alarm in heard(QUIET, facts=facts)]
    assert found[0] == ("no_engine", "")
    assert set(found[1:]) == {
        ("breaker_open", LINK),
        ("loops_frozen", ""),
        ("identity_ends", ""),
        ("incidents_not_written", ""),
    }


def test_the_history_forgets_the_oldest() -> None:
    past = History(samples_max=3)
    for second in range(5):
        past.add(replace(QUIET, at_unix_s=float(second)))
    assert [sample.at_unix_s for sample in past.since(0.0)] == [2.0, 3.0, 4.0]
    assert [sample.at_unix_s for sample in past.since(3.5)] == [4.0]
