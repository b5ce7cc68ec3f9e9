"""Roles of PD engines that are in the file, and of those that join."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from prfaas.config.deployment import Deployment


def deployment(clusters: dict[str, Any], *, reroling: bool = False) -> Deployment:
    return Deployment.model_validate(
        {
            "model": {"name": "m", "path": "m"},
            "routing": {"offload_threshold": 1, "reroling": reroling, "plan": "plan.toml"},
            "security": {"identities": "."},
            "membership": {"folder": "members"},
            "clusters": clusters,
        }
    )


def engines(*roles: str) -> dict[str, Any]:
    found = {f"e-{n}": {"pool": "p", "role": role} for n, role in enumerate(roles)}
    return {"pools": {"p": {}}, "engines": found}


@pytest.mark.parametrize("reroling", [False, True])
def test_engines_that_join_may_have_roles(reroling: bool) -> None:
    assert deployment({"pd": {"role": "pd", "has_roles": True}}, reroling=reroling).has_roles
    assert not deployment({"pd": {"role": "pd"}}).has_roles


def test_engines_in_the_file_show_whether_they_have_roles() -> None:
    assert deployment({"pd": {"role": "pd", **engines("prefill", "decode")}}).has_roles
    assert not deployment({"pd": {"role": "pd", **engines("both")}}).has_roles


@pytest.mark.parametrize(
    ("clusters", "words"),
    [
        ({"pd": {"role": "pd", "has_roles": True, **engines("both")}}, 'has the role "both"'),
        (
            {"pd": {"role": "pd"}, "far": {"role": "prfaas", "has_roles": True}},
            "has_roles is set for far, and the PD clusters are pd",
        ),
        (
            {"a": {"role": "pd", "has_roles": True}, "b": {"role": "pd"}},
            "within the only PD cluster",
        ),
    ],
)
def test_a_contradiction_is_refused(clusters: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        deployment(clusters)
