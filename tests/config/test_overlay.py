"""Settings that take precedence over a deployment file."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from prfaas.cli.plan.plan_command import plan
from prfaas.config.load import load_deployment
from prfaas.errors import ConfigError

ROOT = Path(__file__).parents[2]
LAPTOP = ROOT / "examples" / "laptop.toml"


def test_what_the_planner_emits_is_taken(tmp_path: Path) -> None:
    emitted = CliRunner().invoke(
        plan, [str(ROOT / "examples/plan/paper-case-study.toml"), "--emit"]
    )
    settings = tmp_path / "settings.toml"
    settings.write_text(emitted.output)
    below, above = load_deployment(LAPTOP), load_deployment(LAPTOP, settings)
    assert above.routing.offload_threshold == 19_600
    assert above.routing.transfer_timeout == below.routing.transfer_timeout
    assert above.clusters == below.clusters


def test_an_unknown_key_in_the_overlay_is_an_error(tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text("[routing]\nofload_threshold = 5\n")
    with pytest.raises(ConfigError, match=r"routing\.ofload_threshold.*'offload_threshold'"):
        load_deployment(LAPTOP, settings)


def test_a_missing_overlay_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        load_deployment(LAPTOP, tmp_path / "nowhere.toml")
