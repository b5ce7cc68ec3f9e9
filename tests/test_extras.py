"""Every package that the project imports is asked for: by a bare install, or by an extra that
`prfaas.extras` names."""

import ast
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from prfaas.errors import ConfigError
from prfaas.extras import EXTRAS, extra_of, missing, require

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = PROJECT["optional-dependencies"]
ENGINES = {"torch", "vllm", "sglang"}
"""Brought by the engine whose process imports them."""
BROUGHT = {"tokenizers": "transformers", "huggingface_hub": "transformers"}


def names_of(requirements: list[str]) -> set[str]:
    """Distributions, those of extras of the project itself included."""
    found: set[str] = set()
    for text in requirements:
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            for extra in requirement.extras:
                found |= names_of(OPTIONAL[extra])
        else:
            found.add(canonicalize_name(requirement.name))
    return found


def imported() -> Iterator[str]:
    """Top packages that the code imports, at any place."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (each.name.partition(".")[0] for each in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.partition(".")[0]


@cache
def installed() -> Mapping[str, list[str]]:
    return packages_distributions()


def distributions(module: str) -> set[str]:
    return {canonicalize_name(name) for name in installed().get(module, ())}


def test_every_import_is_of_a_bare_install_or_of_an_extra_that_the_code_knows() -> None:
    known = names_of(PROJECT["dependencies"])
    for module in set(imported()) - set(sys.stdlib_module_names) - ENGINES - {"prfaas"}:
        owners = distributions(BROUGHT.get(module, module))
        if not owners & known:
            extra = extra_of(BROUGHT.get(module, module))
            assert extra is not None, module
            # A package may be installed only on some machines.
            assert not owners or owners & names_of(OPTIONAL[extra]), (module, extra)


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_asks_for_the_packages_of_its_modules(extra: str) -> None:
    asked = names_of(OPTIONAL[extra])
    for module in EXTRAS[extra]:
        package = module.partition(".")[0]
        if package not in ENGINES and (owners := distributions(package)):
            assert owners & asked, module


def test_all_has_every_extra_but_engines() -> None:
    wanted = [each for extra in EXTRAS if extra != "vllm" for each in OPTIONAL[extra]]
    assert names_of(OPTIONAL["all"]) == names_of(wanted)


def test_what_is_missing_is_one_sentence_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing("`prfaas plan`", "plan") is None
    monkeypatch.setitem(sys.modules, "scipy", None)
    sentence = "`prfaas plan` needs scipy, not installed here: pip install 'prfaas[plan]'"
    with pytest.raises(ConfigError) as raised:
        require("`prfaas plan`", "plan")
    assert str(raised.value) == sentence
