"""Start of the kit on the machine: `python3 start.py --out FOLDER`, arguments as `tests.gpu.kit`.

Nothing is installed: the packages beside this file are put on the path, and the copies of
`swap_blocks.cu` are built if there is a compiler. It runs with the Python that has PyTorch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SITE = HERE / "site"


def environment() -> dict[str, str]:
    """Return the variables of the kit's processes."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(SITE), str(HERE), env.get("PYTHONPATH", "")])
    env |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    library = copies()
    if library is not None:
        env["KIT_COPY_LIBRARY"] = str(library)
    return env


def copies() -> Path | None:
    """Build the copies; None without a compiler, where `cuda-bindings` makes them."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        return None
    library = HERE / "libkit_copies.so"
    source = SITE / "kit_bridge" / "swap_blocks.cu"
    command = [nvcc, "-O2", "-shared", "-Xcompiler", "-fPIC", "-arch=sm_90"]
    done = subprocess.run(
        [*command, "-o", str(library), str(source)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(f"nvcc failed, cuda-bindings copy instead: {done.stderr[-500:]}", flush=True)
        return None
    return library


def main() -> None:
    """Become the kit's command."""
    is_dry = sys.argv[1:2] == ["--dry"]
    module, words = ("tests.gpu.kit.dry_run", []) if is_dry else ("tests.gpu.kit", sys.argv[1:])
    for at, word in enumerate(words[:-1]):
        if word in ("--out", "--page"):
            words[at + 1] = str(Path(words[at + 1]).absolute())
    os.chdir(HERE)
    os.execve(sys.executable, [sys.executable, "-m", module, *words], environment())  # noqa: S606


if __name__ == "__main__":
    main()
