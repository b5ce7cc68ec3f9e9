"""A wrong plan file is refused in words that say what, where, and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.errors import ConfigError
from prfaas.planner.answer.plan import make_plan
from prfaas.planner.answer.plan_loader import load_question
from prfaas.planner.solve.search import at_threshold
from prfaas.planner.solve.throughput import StageMode
from tests.planner.paths import EXAMPLES

CASE = EXAMPLES / "paper-case-study.toml"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("pd.instances=0", "pd.instances is 0; at least 1"),
        ('prfaas.0.link.bandwidth="0Gbps"', "link.bandwidth is 0 bit/s; it has to be above 0"),
        ("prfaas.0.instances=-1", "instances is -1; it has to be 0 or more"),
        ("workload.max_tokens=100", "128.0 to 100.0 tokens"),
        ("workload.sigma=0", r"workload.sigma: .* greater than 0, got 0"),
        ("workload.output_tokens=0", "workload.output_tokens is 0"),
        ('prfaas.0.link.bandwidth="fast"', "prfaas.0.link.bandwidth: 'fast' is not a rate"),
        ("prfaas.0.link.bandwidth=100", "prfaas.0.link.bandwidth: 100 has no unit"),
        ("prfaas.0.link.bandwith=1", "prfaas.0.link.bandwith: unknown key.* 'bandwidth'"),
        ("pd.instancs=1", "pd.instancs: unknown key; the nearest valid one is 'instances'"),
        ("wrkload.mu=1", "wrkload: unknown key; the nearest valid one is 'workload'"),
        ('model.catalogue="x"', "exactly one of catalogue, config, kv_bytes_per_token"),
        ("workload.mu", "expected key=value"),
        ("prfaas.5.instances=1", "'5' is not an index below 1"),
        ("prfaas.².instances=1", "'²' is not an index below 1"),
        ("title.x=1", "'title' is a value, not a table"),
        ("search.threshold=200000", "threshold 200000 is outside the workload's lengths, 128 to"),
        ("workload.max_tokens=90000000", "search.step = 100 makes 7,199,990 points"),
        ("search.step=0", "search.step is 0; it has to be at least 1 token"),
        ('workload.distribution="trace"', 'distribution = "trace" needs trace'),
        ('pd.profile="missing.toml"', "missing.toml cannot be read"),
    ],
)
def test_impossible_settings(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(load_question(CASE, [setting]))


def test_unknown_keys_of_a_profile_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text('[prefill]\nsource = "x"\nlenghts = [1, 2]\nseconds = [1, 2]')
    plan = CASE.read_text().replace("profiles/paper-8xh200-1t.toml", "p.toml")
    plan = plan.replace("profiles/", f"{EXAMPLES}/profiles/")
    (tmp_path / "plan.toml").write_text(plan)
    with pytest.raises(ConfigError, match=r"prefill\.lenghts: unknown key.*'lengths'"):
        load_question(tmp_path / "plan.toml")


def test_a_profile_shorter_than_the_workload_is_refused(tmp_path: Path) -> None:
    text = (EXAMPLES / "profiles" / "paper-8xh200-1t.toml").read_text()
    (tmp_path / "p.toml").write_text(text.replace("extrapolate = true", ""))
    setting = f'prfaas.0.profile="{tmp_path / "p.toml"}"'
    with pytest.raises(ConfigError, match=r"covers 1024 to 130000 tokens.*from 128 to 131072"):
        load_question(CASE, [setting])


def test_a_falling_profile_is_refused() -> None:
    setting = 'pd.prefill={source="x", lengths=[1, 200000], seconds=[2, 1]}'
    with pytest.raises(ConfigError, match=r"1\.0 s at 200000 tokens is less than 2\.0 s at 1"):
        load_question(CASE, [setting])


def test_a_threshold_outside_the_lengths_is_refused() -> None:
    problem = load_question(CASE).problem
    with pytest.raises(ConfigError, match=r"threshold 200000 is outside .* 128 to 131072"):
        at_threshold(problem, StageMode.PAPER, 200_000)


def test_overrides_are_applied() -> None:
    question = load_question(
        CASE, ["pd.instances=10", 'prfaas.0.link.bandwidth="10Gbps"', "title=other words"]
    )
    assert question.problem.pd.num_instances == 10
    assert question.problem.prfaas[0].link.bits_per_s == 10e9
    assert question.problem.title == "other words"


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("title = ")
    with pytest.raises(ConfigError, match="is no valid TOML"):
        load_question(path)


def test_a_given_threshold_is_kept() -> None:
    question = load_question(CASE, ["search.threshold=10000"])
    found = make_plan(question).exact.prfaas.operation
    assert found.offload_threshold == 10_000
    assert found.rate_per_s < 3.17
