"""The commands, end to end in one process."""

from __future__ import annotations

import io
import json
import re
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from prfaas.cli.plan.plan_command import model, plan
from prfaas.config.deployment import Deployment
from prfaas.errors import ConfigError
from prfaas.planner.answer.plan import make_plan
from prfaas.planner.answer.plan_file import PlanFile
from prfaas.planner.answer.plan_loader import load_question
from prfaas.planner.report.terminal import print_plan
from tests.planner import tiny_models
from tests.planner.paths import EXAMPLES, REPOSITORY

CASE = str(EXAMPLES / "paper-case-study.toml")


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(plan, arguments)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


PAGE_BYTES_MAX = 400_000


def run_model(*arguments: str) -> Result:
    result = CliRunner().invoke(model, arguments)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_terminal_shows_the_case_study() -> None:
    output = run(CASE, "--details").output
    for words in (
        "Prefill-as-a-Service pays: +17.9%",
        "(+15.5% with",
        "4/3/5",
        "0/9/3",
        "4/0/8",
        "19,400",
        "PrfaaS prefill binds",
        "10 % more cache hits",
        "t, thousand tokens",
        "extrapolated outside 1,024-130,000 tokens",
    ):
        assert words in output


def test_the_verdict_and_its_four_numbers_come_first_and_alone() -> None:
    output = run(CASE).output
    for words in ("pays: +17.9%", "19,600 tokens", "3.18 req/s", "of 100.0 Gbit/s", "--details"):
        assert words in output
    assert len(output.splitlines()) < 20
    assert "4/3/5" not in output


def test_the_page_is_small_dark_and_begins_with_the_verdict(tmp_path: Path) -> None:
    report = tmp_path / "plan.html"
    assert run(CASE, "--report", str(report)).exit_code == 0
    page = report.read_text(encoding="utf-8")
    assert len(page.encode()) < PAGE_BYTES_MAX
    for words in ("prefers-color-scheme: dark", 'name="viewport"', "overflow-x: auto"):
        assert words in page
    body = page[page.index("<body>") :]
    assert body.index("pays: +17.9%") < body.index("4/3/5")


def test_every_figure_of_the_verdict_has_its_uncertainty() -> None:
    found = json.loads(run(CASE, "--json").output)["verdict"]
    low, high = found["between"]
    assert low < 0.179 < high
    for words in (
        f"{low:+.1%} to {high:+.1%} with one input 20 % off",
        "3.18 ± 0.06",
        "49% ± 0.8%",
    ):
        assert words in found["sentence"]


def test_the_terminal_fits_80_columns() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    print_plan(make_plan(load_question(Path(CASE))), console)
    text = console.export_text()
    assert "homogeneous, equal GPUs    96" in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text


def test_json_has_every_number() -> None:
    found = json.loads(run(CASE, "--json").output)
    ours = found["paper"]["designs"][0]
    assert ours["rate_per_s"] == pytest.approx(3.24, rel=0.01)
    assert ours["binding"] == "PrfaaS prefill"
    assert found["verdict"]["answer"] == "pays"
    assert found["latency"]["service"]["PrfaaS-PD"]["p90"] == pytest.approx(3.51, rel=0.01)
    assert found["latency"]["queued"]["naive heterogeneous"]["mean"] is None


def test_emit_is_a_fragment_of_a_deployment_file() -> None:
    output = run(CASE, "--emit").output
    assert tomllib.loads(output) == {"routing": {"offload_threshold": 19_600}}
    assert "# H20 cluster                     decode            5" in output


def test_prfaas_up_takes_the_emitted_settings() -> None:
    deployment = tomllib.loads((REPOSITORY / "examples" / "laptop.toml").read_text())
    deployment["routing"] |= tomllib.loads(run(CASE, "--emit").output)["routing"]
    assert Deployment.model_validate(deployment).routing.offload_threshold == 19_600


def test_emit_with_a_demand_gives_the_cheapest_fleet_that_carries_it() -> None:
    plain = run(CASE, "--emit").stdout
    assert "# Fleet: as in the plan file.\n" in plain
    result = run(CASE, "--emit", "--set", "workload.arrival_rate=10")
    assert (
        "# Fleet: the cheapest that carries 10 req/s; the plan file has 4 in H200" in result.stdout
    )
    answer = json.loads(run(CASE, "--json", "--set", "workload.arrival_rate=10").stdout)
    fleet = answer["sizing"]["cheapest"]
    counts = [int(line.split()[-1]) for line in result.stdout.splitlines() if "fill  " in line]
    assert counts == [*fleet["prfaas"], fleet["num_prefill"]]
    settings = tomllib.loads(result.stdout)["routing"]
    assert settings["offload_threshold"] == round(fleet["offload_threshold"])
    assert settings != tomllib.loads(plain)["routing"]
    assert "note: the settings are for another fleet than the plan file's" in result.stderr


def test_emit_with_a_demand_that_no_fleet_carries_keeps_the_fleet_of_the_file() -> None:
    result = run(CASE, "--emit", "--set", "workload.arrival_rate=10", "--set", 'slo.ttft_p90="1s"')
    words = "# Fleet: as in the plan file, since no fleet carries 10 req/s."
    assert words in result.stdout.splitlines()


def test_emit_of_a_plan_that_offloads_nothing() -> None:
    result = run(CASE, "--emit", "--set", "prfaas.0.instances=0")
    assert tomllib.loads(result.stdout)["routing"]["offload_threshold"] == 131_072
    assert "Nothing is offloaded" in result.stdout
    assert "note: Prefill-as-a-Service" in result.stderr


def test_the_report_is_one_file_that_needs_no_network(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    run(CASE, "--report", str(path))
    text = path.read_text(encoding="utf-8")
    assert not re.search("<script|<link|src=|href=", text)
    for words in ("against the threshold", "against the split", "egress", "one input 20 % off"):
        assert words in text


def test_a_setting_is_changed() -> None:
    output = run(CASE, "--json", "--set", 'prfaas.0.link.bandwidth="1Gbps"').output
    assert json.loads(output)["verdict"]["answer"] == "does not pay"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("paper-case-study", "pays"),
        ("qwen3.5-397b", "pays"),
        ("llama-3.3-70b-dense", "does not pay"),
    ],
)
def test_examples_answer(name: str, answer: str) -> None:
    found = json.loads(run(str(EXAMPLES / f"{name}.toml"), "--json").output)
    assert found["verdict"]["answer"] == answer


def test_mistakes_are_errors_of_the_operator() -> None:
    with pytest.raises(ConfigError, match=r"no-such\.toml cannot be read"):
        run("no-such.toml")
    with pytest.raises(ConfigError, match="--report"):
        run(CASE, "--report", "/no/such/place.html")
    with pytest.raises(ConfigError, match=r"plan\.svg: a plan is written as \.html"):
        run(CASE, "--report", "plan.svg")


def test_model_shows_a_config_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_models.DEMO))
    output = run_model(str(path), "--block-size", "384", "--state-dtype", "float32").output
    for words in ("196,608", "137,216", "Gated DeltaNet", "2 KV heads x 64"):
        assert words in output


def test_model_shows_kv_throughput_with_a_profile() -> None:
    times = str(EXAMPLES / "profiles" / "qwen3.5-397b-8xh200.toml")
    found = json.loads(run_model("qwen3.5-397b-a17b", "--profile", times, "--json").output)
    by_length = {row["num_tokens"]: row for row in found["lengths"]}
    # Table 3 of the paper: 4.13 and 6.28 Gbit/s at 1K and 8K.
    assert by_length[1024]["kv_bits_per_s"] == pytest.approx(4.13e9, rel=0.01)
    assert by_length[8192]["kv_bits_per_s"] == pytest.approx(6.28e9, rel=0.01)


def test_model_shows_a_ceiling_of_kv_throughput_without_a_profile() -> None:
    output = run_model("llama_3_3_70b", "--gpus", "2", "--efficiency", "0.43").output
    assert "roofline of 2 x NVIDIA H200 SXM, fp8, 43% of the peak" in output
    # 8,192 tokens x 320 KiB in 0.731 s, near silicon's 0.733 s.
    assert "731 ms" in output
    assert "29.4 Gbit/s" in output


def test_model_of_a_config_json_takes_the_number_of_parameters(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_models.DEMO))
    assert "3.15 M active parameters" in run_model(str(path)).output
    assert "10 M active" in run_model(str(path), "--active-parameters", "1e7").output
    path.write_text(json.dumps({k: v for k, v in tiny_models.DEMO.items() if k != "vocab_size"}))
    assert "Φ_kv needs prefill times" in run_model(str(path)).output


def test_model_lists_the_catalogue_and_suggests() -> None:
    assert "Qwen3.5-397B-A17B" in run_model("--list").output
    with pytest.raises(ConfigError, match="did you mean 'deepseek_v3'"):
        run_model("deepsek_v3")


def test_every_key_of_a_plan_file_is_documented() -> None:
    documentation = (REPOSITORY / "docs" / "planner.md").read_text(encoding="utf-8")
    missing = [key for key in _keys(PlanFile) if f"`{key}`" not in documentation]
    assert not missing


def _keys(table: type) -> set[str]:
    from pydantic import BaseModel

    keys: set[str] = set()
    for name, field in table.model_fields.items():  # type: ignore[attr-defined]
        keys.add(name)
        stack = [field.annotation]
        while stack:
            annotation = stack.pop()
            stack += getattr(annotation, "__args__", ())
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                keys |= _keys(annotation)
    return keys
