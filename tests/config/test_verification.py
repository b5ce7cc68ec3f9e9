"""Verification in deployment files: what makes no sense is refused with key and reason."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from prfaas.config.load import load_deployment
from prfaas.config.routing import RoutingTable
from prfaas.errors import ConfigError
from tests.config.good_file import GOOD, toml
from tests.deployments import TIMING


def loaded(tmp_path: Path, **routing: Any) -> RoutingTable:
    tables = copy.deepcopy(GOOD)
    tables["routing"] |= routing
    path = tmp_path / "deployment.toml"
    path.write_text(toml(tables))
    return load_deployment(path).routing


def test_nothing_is_verified_by_default(tmp_path: Path) -> None:
    assert loaded(tmp_path).verify_one_in is None
    found = loaded(tmp_path, verify_one_in=50, verify_limits={"bfloat16": 0.1})
    assert (found.verify_one_in, found.verify_limits) == (50, {"bfloat16": 0.1})


@pytest.mark.parametrize(
    ("routing", "says"),
    [
        ({"verify_one_in": 0}, r"verify_one_in.*greater than or equal to 1"),
        ({"verify_limits": {"bfloat16": 0.1}}, "verify_limits need verify_one_in"),
        ({"verify_one_in": 5, "verify_limits": {"bfloat16": 0.0}}, "greater than 0"),
        ({"verify_one_in": 5, "verify_limits": {"int8": 0.1}}, "are not judged"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, routing: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        loaded(tmp_path, **routing)


def test_blocks_of_timing_engines_cannot_be_verified(tmp_path: Path) -> None:
    overlay = tmp_path / "settings.toml"
    overlay.write_text("[routing]\nverify_one_in = 50\n")
    with pytest.raises(ConfigError, match="timing engines depend on the salt"):
        load_deployment(TIMING, overlay)
