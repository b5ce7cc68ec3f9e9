"""Load of both stages of the PD cluster, from late and missing reports."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from prfaas.core.control.role_loop import STALE_NS, InstanceQueue, Role, StageLoad, StageLoads
from prfaas.core.control.split import Split, decode_name, instance_of
from prfaas.units import NS_PER_S


@dataclass
class Sent:
    """Requests sent to each instance."""

    jobs: int = 0
    waiting_ns: int = 0

    def num_jobs(self, _name: str) -> int:
        return self.jobs

    def queued_ns(self, _name: str) -> int:
        return self.waiting_ns


def test_an_instance_is_busy_that_reports_requests_and_work_waits_as_it_was_sent() -> None:
    loads, sent = StageLoads(4), Sent(jobs=1, waiting_ns=5)
    loads.report("a", InstanceQueue(0, 1, 0))
    loads.report("b", InstanceQueue(0, 0, 0))
    assert loads.prefill(["a", "b"], lambda _: sent, 0, 0) == StageLoad(1, 10)


def test_an_instance_that_does_not_report_what_runs_is_busy_with_what_was_sent() -> None:
    loads = StageLoads(4)
    loads.report("a", InstanceQueue(0, None, 0))
    assert loads.prefill(["a"], lambda _: Sent(1), 0, 0) == StageLoad(1, 0)
    assert loads.prefill(["a"], lambda _: Sent(0), 0, 0) == StageLoad(0, 0)
    assert loads.decode(["a"], 0) is None


def test_the_load_of_a_stage_is_unknown_when_one_report_is_missing_or_too_old() -> None:
    loads = StageLoads(4)
    loads.report("a", InstanceQueue(0, 0, 0))
    for names, now_ns, known in ((["a"], STALE_NS, True), (["a"], STALE_NS + 1, False)):
        assert (loads.decode(names, now_ns) is not None) is known
        assert (loads.prefill(names, lambda _: Sent(), 0, now_ns) is not None) is known
    assert loads.decode(["a", "b"], 0) is None


def test_waiting_decodes_take_the_mean_time_of_those_that_ended() -> None:
    loads = StageLoads(4)
    loads.decoded(2 * NS_PER_S)
    loads.report("a", InstanceQueue(0, 4, 6))
    assert loads.decode(["a"], 0) == StageLoad(1.0, 3 * NS_PER_S)
    loads.decoded(52 * NS_PER_S)
    assert loads.decode(["a"], 0) == StageLoad(1.0, round(4.5 * NS_PER_S))


def test_an_instance_has_one_name_in_either_role() -> None:
    assert instance_of(decode_name("p00001")) == instance_of("p00001") == "p00001"
    split = Split(["a", "b"], [Role.PREFILL, Role.DECODE], None)
    for name in split.names:
        split.set_usable(name, usable=True)
    assert dict(split.ready()) == {
        "a": True,
        decode_name("a"): False,
        "b": False,
        decode_name("b"): True,
    }


@pytest.mark.parametrize("gone", ["a", "b"])
def test_where_no_instance_is_left_in_a_role_those_of_the_other_do_both(gone: str) -> None:
    split = Split(["a", "b"], [Role.PREFILL, Role.DECODE], None)
    left = {"a", "b"} - {gone}
    for name in left:
        split.set_usable(name, usable=True)
    ready = {name for name, is_ready in split.ready() if is_ready}
    assert ready == left | {decode_name(name) for name in left}
