"""The list of vLLM's arguments is that of its own parser, and arguments are read as it would."""

import subprocess
import sys
from importlib import metadata

import pytest

from prfaas.cli.preflight import vllm_flags
from prfaas.cli.preflight.vllm_flags import flags, given, listed_version, similar
from tests.engines.vllm_modules import needing_vllm

pytestmark = pytest.mark.timeout(180)


@pytest.mark.nightly
def test_the_list_is_that_of_vllms_own_parser() -> None:
    vllm = needing_vllm("vllm")
    if not vllm.__version__.startswith(f"{listed_version()}."):
        pytest.skip(f"the list is of vLLM {listed_version()}")
    printed = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "prfaas.cli.preflight.vllm_flags"],
        check=True,
        capture_output=True,
        text=True,
        timeout=170,
    ).stdout
    assert set(vllm_flags._lines()) <= set(printed.splitlines()), (
        "run: python -m prfaas.cli.preflight.vllm_flags > src/prfaas/cli/preflight/vllm_flags.txt"
    )


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--block-size", "384"], [("--block-size", "384")]),
        (["--block_size=384"], [("--block-size", "384")]),
        (["-tp", "2"], [("--tensor-parallel-size", "2")]),
        (["--tensor-par", "2"], [("--tensor-parallel-size", "2")]),
        (["--enforce-eager", "--seed", "-1"], [("--enforce-eager", "yes"), ("--seed", "-1")]),
        (["--no-enforce-eager"], [("--enforce-eager", "no")]),
        (["--hf-overrides.rope_theta", "5e5"], [("--hf-overrides.rope_theta", "5e5")]),
        (["--hf-overrides", '{"a": 1}'], [("--hf-overrides", '{"a": 1}')]),
        (
            ["--allowed-media-domains", "a", "b", "--seed", "1"],
            [("--allowed-media-domains", "a b"), ("--seed", "1")],
        ),
        (["--seed"], [("--seed", "")]),
        (["stray"], []),
        ([], []),
    ],
)
def test_arguments_are_told_apart_as_vllm_does(
    args: list[str], expected: list[tuple[str, str]]
) -> None:
    found = list(given(args))
    assert [(each.name, each.value) for each in found] == expected
    assert all(each.is_known for each in found)


@pytest.mark.parametrize("name", ["--blok-size", "--max", "-x", "--block-size-"])
def test_what_vllm_does_not_know_is_told(name: str) -> None:
    [found] = given([name, "384"])
    assert (found.name, found.is_known) == (name, False)


def test_a_slip_of_the_pen_is_recognised() -> None:
    assert similar("--blok-size") == "--block-size"
    assert similar("--qqqqqqqq") is None
    assert len(flags()) > 300


def test_another_version_is_not_held_to_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, expected in (("0.33.1", False), (f"{listed_version()}.0+cpu", True)):
        monkeypatch.setattr(metadata, "version", lambda _, version=version: version)
        assert vllm_flags.is_listed_version() is expected
