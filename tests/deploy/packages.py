"""Empty environments, and what is installed into them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .charts import ROOT

UV = Path(sys.executable).with_name("uv")


def call(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command to its end; what it prints."""
    # Nothing of the environment that runs the tests may be found by what is run.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def environment(local: Path, requirements: str) -> Path:
    """A new virtual environment with the pinned packages of a file; its `python`."""
    call(UV, "venv", "-q", "--python", sys.executable, local)
    python, pins = local / "bin" / "python", ROOT / "requirements" / requirements
    install = (UV, "pip", "install", "-q", "--python", python, "--no-deps")
    call(*install, "--require-hashes", "--only-binary", ":all:", "-r", pins)
    return python


def installed(local: Path, wheel: Path, *extras: str) -> Path:
    """The `bin` of a new environment with the wheel and extras, in the versions of the lock."""
    call(UV, "venv", "-q", "--python", sys.executable, local)
    pins = ROOT / "requirements" / "lock.txt"
    what = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
    install = (UV, "pip", "install", "-q", "--python", local / "bin" / "python", "-c", pins)
    call(*install, "--only-binary", ":all:", what)
    return local / "bin"
