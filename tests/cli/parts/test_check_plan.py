"""`prfaas check` refuses a plan that cannot be this deployment's."""

import json
from pathlib import Path

import pytest

from prfaas.cli.parts.gateway_plan import load_profiles
from prfaas.config.load import load_deployment
from tests.cli.check_files import CASE_STUDY, TIMING
from tests.cli.conftest import Prfaas, edit, one_line
from tests.plans import plan_file


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two timing engines in either cluster, and a plan with as many instances, which they run."""
    monkeypatch.chdir(tmp_path)
    plan = plan_file(tmp_path, instances=2)
    edit(plan, "instances = 1\n", "instances = 2\n")
    file = tmp_path / "timing.toml"
    text = TIMING.replace(str(CASE_STUDY), str(plan))
    file.write_text(text.replace('policy = "paper"', f'plan = "{plan}"'))
    return file


SECOND = """[[prfaas]]
name = "other"
instances = 2
link = { bandwidth = "1Gbps" }
prefill = { source = "a test", lengths = [100, 4000], seconds = [1, 2] }
[pd]"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            'name = "home"\ninstances = 2',
            'name = "home"\ninstances = 3',
            "cluster pd has 2 engines, and the plan has 3 instances",
        ),
        (
            'name = "remote"\ninstances = 2',
            'name = "remote"\ninstances = 1',
            "cluster prfaas has 2 engines, and the plan has 1 instances",
        ),
        ("[pd]", SECOND, "no PrfaaS cluster is called 'prfaas'"),
    ],
)
def test_a_plan_for_other_clusters_is_refused(
    prfaas: Prfaas, planned: Path, old: str, new: str, said: str
) -> None:
    assert prfaas("check", planned)[0] == 0
    edit(planned.parent / "plan.toml", old, new)
    assert said in one_line(prfaas("check", planned))


def test_a_plan_with_a_cluster_too_many_is_refused(prfaas: Prfaas, planned: Path) -> None:
    edit(planned.parent / "plan.toml", 'name = "remote"', 'name = "prfaas"')
    assert prfaas("check", planned)[0] == 0
    edit(planned.parent / "plan.toml", "[pd]", SECOND)
    line = one_line(prfaas("check", planned))
    assert "it has a PrfaaS cluster 'other', and the deployment has none of that name" in line


def test_a_plan_for_another_model_than_the_timing_engines_run_is_refused(
    prfaas: Prfaas, planned: Path
) -> None:
    other = planned.parent / "other.toml"
    text = (planned.parent / "plan.toml").read_text()
    other.write_text(text.replace("1kB", "3kB"))
    edit(planned, f'plan = "{planned.parent}/plan.toml"\n', f'plan = "{other}"\n')
    first = planned.read_text().replace(str(other), f"{planned.parent}/plan.toml", 1)
    planned.write_text(first)
    line = one_line(prfaas("check", planned))
    assert "8192 tokens are" in line
    assert "clusters.prfaas.timing.plan" in line


def test_a_plan_for_another_model_than_the_checkpoint_is_refused(
    prfaas: Prfaas, laptop: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "dtype": "bfloat16",
    }
    (checkpoint / "config.json").write_text(json.dumps(config))
    plan = plan_file(tmp_path)
    edit(plan, "1kB", "4kB")
    edit(laptop, "[routing]\n", f'[routing]\nplan = "{plan}"\n')
    edit(laptop, 'path = ".state/demo-model"', f'path = "{checkpoint}"')
    line = one_line(prfaas("check", laptop))
    assert f"of KV cache in {checkpoint}/config.json" in line
    edit(plan, "4kB", "512B")
    assert prfaas("check", laptop)[0] == 0


def test_predictions_are_for_the_scales_that_timing_engines_run_at(planned: Path) -> None:
    """A tenth of the plan's time, and a thousandth of its bytes."""
    costs = load_profiles(load_deployment(planned)).local
    assert costs is not None
    assert costs.local_prefill_ns(100) == 3_000_000_000 // 10
    assert costs.remote_prefill_ns(4000) == 10_000_000_000 // 10
    assert costs.shipped_bytes(1000, 0) == 1000
