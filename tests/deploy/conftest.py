"""The wheel, and environments with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from .packages import UV, call, environment, installed


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built as the Containerfile builds it."""
    local = tmp_path_factory.mktemp("wheel")
    build = environment(local / "build", "build.txt")
    call(build, "-m", "hatchling", "build", "-t", "wheel", "-d", local / "wheels")
    [wheel] = (local / "wheels").glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a bare install."""
    return installed(tmp_path_factory.mktemp("bare") / "env", wheel)


@pytest.fixture(scope="session")
def served(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an install with what a gateway and the demo need."""
    return installed(tmp_path_factory.mktemp("served") / "env", wheel, "gateway")


@pytest.fixture(scope="session")
def shipped(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment that was made as the Containerfile makes it."""
    local = tmp_path_factory.mktemp("shipped")
    python = environment(local / "env", "runtime.txt")
    call(UV, "pip", "install", "-q", "--python", python, "--no-deps", "--no-index", wheel)
    # Every requirement of every package, those of prfaas included, is there in a version that fits.
    call(UV, "pip", "check", "-q", "--python", python)
    return python.parent
