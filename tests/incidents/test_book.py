"""Incidents in memory: begin, end, whom they touch, what a restart leaves."""

from __future__ import annotations

from prfaas.core.request.facts import RequestTroubled
from prfaas.incidents.alarm_kinds import Kind, Severity
from prfaas.incidents.alarm_list import BY_NAME
from prfaas.incidents.book import AGAIN_S, BEFORE_S, LATE_S, RECENT_MAX, IncidentBook
from prfaas.incidents.incident import COUNTED_MAX, REQUESTS_MAX, STEPS_MAX, TENANTS_MAX, Incident
from prfaas.incidents.rules import Alarm

DOWN = Alarm(BY_NAME["engine_down"], "e", "engine e is not ready: gone")
LINK = Alarm(BY_NAME["link_down"], "a>b", "link a>b is down")
T = 1_000_000.0


def book(grace_s: float = 0.0) -> IncidentBook:
    return IncidentBook(T, grace_s)


def trouble(
    number: int = 1,
    what: str = "decode",
    engine: str = "e",
    pools: tuple[str, str] = ("", ""),
    started: float = T,
    tenant: str = "acme",
) -> RequestTroubled:
    return RequestTroubled(f"r{number}", tenant, started, what, "broken", engine, pools)


def the_one(found: IncidentBook) -> Incident:
    [incident] = found.recent.values()
    return incident


def test_an_alarm_begins_and_ends_an_incident() -> None:
    made = book()
    made.look([], T)
    made.look([DOWN], T + 10)
    incident = the_one(made)
    assert (incident.began_at, incident.ended_at) == (T + 10, None)
    made.look([DOWN], T + 11)
    made.look([], T + 15)
    assert (incident.began_at, incident.ended_at) == (T + 10, T + 15)
    assert "5.0 s" in incident.when
    assert incident.what == "Engine e is not ready: gone."
    assert incident.whom == "It touched no request."
    assert incident.id in made.unwritten


def test_parts_that_are_being_connected_are_no_incident() -> None:
    made = book(grace_s=5.0)
    made.look([DOWN], T + 1)
    assert not made.recent
    made.look([], T + 4)
    made.look([DOWN], T + 4.5)
    made.look([DOWN], T + 6)
    assert the_one(made).began_at == T + 4.5


def test_a_link_that_comes_back_with_its_pool_is_no_incident() -> None:
    made = book()
    made.look([LINK], T)
    made.look([LINK], T + 1)
    made.look([], T + 1.5)
    assert not made.recent
    made.look([LINK], T + 5)
    made.look([LINK], T + 7.5)
    assert the_one(made).began_at == T + 5


def test_a_part_that_flaps_has_one_incident() -> None:
    made = book()
    for second in range(0, 20, 2):
        made.look([DOWN], T + second)
        made.look([], T + second + 1)
    incident = the_one(made)
    assert incident.num_times == 10
    assert "10 times" in incident.what
    made.look([DOWN], T + 19 + AGAIN_S + 1)
    assert len(made.recent) == 2


def test_requests_count_once_and_before_and_after() -> None:
    made = book()
    made.trouble(trouble(0), T - BEFORE_S - 1)
    made.trouble(trouble(1), T - 1)
    made.trouble(trouble(2, engine="other"), T - 1)
    made.look([DOWN], T)
    incident = the_one(made)
    assert incident.began_at == T - 1
    assert incident.requests == ["r1"]
    made.trouble(trouble(1, what="failed"), T + 1)
    made.trouble(trouble(3, tenant="beta"), T + 1)
    made.look([], T + 2)
    made.trouble(trouble(4, started=T + 1), T + 60)
    made.trouble(trouble(5, started=T + 3), T + 60)
    made.trouble(trouble(6, started=T + 1), T + 3 + LATE_S)
    assert incident.requests == ["r1", "r3", "r4"]
    assert incident.tenants == {"acme": 2, "beta": 1}
    assert incident.effects == {"decode": 3, "failed": 1}
    assert "3 continued by another engine, 1 failed" in incident.did
    assert "None failed" not in incident.did


def test_a_sign_explains_one_incident_only() -> None:
    made = book()
    made.trouble(trouble(1, "transfer", "e", ("a", "b")), T)
    made.look([Alarm(BY_NAME["pool_silent"], "a", "silent")], T + 1)
    made.look([Alarm(BY_NAME["pool_silent"], "a", "silent"), LINK], T + 2)
    made.look([Alarm(BY_NAME["pool_silent"], "a", "silent"), LINK], T + 5)
    pool, link = made.recent.values()
    assert (pool.num_requests, link.num_requests) == (1, 0)
    assert link.began_at == T + 2


def test_refusals_touch_the_overload_and_no_engine() -> None:
    made = book()
    made.look([DOWN], T)
    made.look([DOWN, Alarm(BY_NAME["refusals"], "", "requests are refused")], T + 1)
    made.trouble(trouble(1, what="refused", engine=""), T + 2)
    engine, overload = made.recent.values()
    assert (engine.num_requests, overload.num_requests) == (0, 1)


def test_an_incident_is_bounded_whoever_asks() -> None:
    made = book()
    made.look([DOWN], T)
    for number in range(COUNTED_MAX + 10):
        made.trouble(trouble(number, tenant=f"t{number % 100}"), T + 1)
    for second in range(100):
        made.step(DOWN.key, "again", T + second)
    incident = the_one(made)
    assert len(incident.requests) == REQUESTS_MAX
    assert len(incident.tenants) == TENANTS_MAX
    assert len(incident.steps) == STEPS_MAX
    assert incident.num_requests >= COUNTED_MAX
    assert "more than 20 tenants" in incident.whom


def test_the_oldest_ended_ones_are_forgotten_and_counted() -> None:
    made = book()
    made.look([DOWN], T)
    first = the_one(made)
    for number in range(RECENT_MAX + 5):
        made.note("member", Kind.MEMBER, f"m{number}", "joined", T + number)
    assert len(made.recent) == RECENT_MAX
    assert first.id in made.recent  # it is open
    assert made.num_lost == 6


def test_what_operators_begin_and_end() -> None:
    made = book()
    made.span("drained", Kind.OPERATOR, "e", "ann: drain engine e", T)
    incident = the_one(made)
    made.trouble(trouble(1, started=T), T + 1)
    assert made.over("drained", "e", "ann: resume engine e", T + 5)
    assert not made.over("drained", "e", "ann: resume engine e", T + 6)
    assert (incident.ended_at, incident.how_ended) == (T + 5, "ann: resume engine e")
    assert incident.num_requests == 0  # a change is nobody's trouble


def test_moves_of_a_threshold_that_follow_each_other_are_one() -> None:
    made = book()
    for second in range(0, 600, 60):
        made.moved("a>b", f"threshold {second}", T + second)
    incident = the_one(made)
    assert (incident.num_times, incident.ended_at) == (10, T + 540)
    made.moved("a>b", "threshold 1", T + 1000)
    assert len(made.recent) == 2


def left(key: Alarm | None = DOWN) -> Incident:
    """Left open by an earlier process."""
    old = IncidentBook(T - 1000, 0.0)
    if key is None:
        old.span("drained", Kind.OPERATOR, "e", "ann: drain engine e", T - 100)
    else:
        old.look([key], T - 100)
    return the_one(old)


def test_an_incident_goes_on_after_a_restart() -> None:
    made, incident = book(grace_s=5.0), left()
    made.carry([incident], T - 7, T)
    made.look([DOWN], T + 1)
    assert incident.ended_at is None
    made.look([DOWN], T + 6)
    assert (the_one(made).id, incident.ended_at) == (incident.id, None)
    made.look([], T + 8)
    assert incident.ended_at == T + 8
    assert any("nobody watched for 7.0 s" in step.text for step in incident.steps)


def test_an_incident_that_ended_unseen_says_so() -> None:
    made, incident = book(grace_s=5.0), left()
    made.carry([incident], T - 7, T)
    made.look([], T + 4)
    assert incident.ended_at is None  # not known yet
    made.look([], T + 6)
    assert incident.ended_at == T
    assert "nobody watched its end" in incident.when


def test_a_restart_discards_what_an_operator_began() -> None:
    made, incident = book(), left(None)
    made.carry([incident], T - 7, T)
    assert incident.ended_at == T
    assert "discards it" in incident.when


def test_an_alarm_that_turns_into_another_says_so() -> None:
    made = book()
    made.look([DOWN], T)
    made.look([Alarm(BY_NAME["certificate_refused"], "e", "certificate verify failed")], T + 3)
    first, second = made.recent.values()
    assert "it goes on as 'Certificate refused'" in first.when
    assert (second.kind, second.severity) == (Kind.CERTIFICATE, Severity.CRITICAL)
