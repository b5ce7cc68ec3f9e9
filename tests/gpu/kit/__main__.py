"""Every part of the kit, one after the other: `python -m tests.gpu.kit --out FOLDER`.

    --device cpu       the same parts in small, without a GPU
    --parts a,c        some of them
    --page FILE        where the page goes; FOLDER/gpu.md otherwise
    --seconds N        no part is started after so long

FOLDER gets eight files: part-NAME.json of each part, machine.json, parts.log and gpu.md.

Each part is a process with a limit of its own; what it had written is kept when it is cut.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.gpu.kit import facts, page
from tests.gpu.kit.parts import BY_NAME, Part, chosen, run_part
from tests.gpu.kit.results import Results, read

SECONDS = 540.0
ROOT = Path(__file__).parents[3]


def run_all(parts: tuple[Part, ...], device: str, out: Path, seconds: float) -> bool:
    """Run parts in processes; False if one has faults, was cut, or did not run.

    Args:
        parts: In their order.
        device: "cuda" or "cpu".
        out: Folder of the results.
        seconds: No part is started after so long.
    """
    began, is_good = time.monotonic(), True
    for part in parts:
        limit_s = float(part.limit_s if device == "cuda" else part.limit_cpu_s)
        left_s = seconds - (time.monotonic() - began)
        if left_s <= 5:
            Results(out, part.name, device).skip("no time was left")
            is_good = False
            continue
        is_good &= _run_one(part, device, out, min(limit_s, left_s))
    return is_good


def _run_one(part: Part, device: str, out: Path, limit_s: float) -> bool:
    command = [sys.executable, "-m", "tests.gpu.kit", "--device", device, "--out", str(out)]
    command += ["--in-process", part.name]
    print(f"({part.letter}) {part.name}, at most {limit_s:.0f} s", flush=True)
    # One file for all, so that few files have to be brought back.
    with (out / "parts.log").open("ab") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            cut = f"cut after {limit_s:.0f} s"
        else:
            cut = ""
        finally:
            # Engines and pool nodes of a part that was cut are in its session.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = read(out, part.name) or {"faults": [], "ended": ""}
    if not found["ended"]:
        _close(part, device, out, cut or f"ended with exit code {process.returncode}")
        found = read(out, part.name) or found
    for words in found["faults"]:
        print(f"  fault: {words}", flush=True)
    print(f"  {found['ended']}, {found.get('seconds', 0)} s", flush=True)
    return bool(found["ended"] == "done")


def _close(part: Part, device: str, out: Path, ended: str) -> None:
    """Write how a part ended that could not do so itself; its records stay."""
    results, known = Results(out, part.name, device), read(out, part.name) or {}
    results.records = known.get("records", [])
    results.faults = known.get("faults", [])
    results.skipped = known.get("skipped", [])
    results.save(ended)


def main() -> int:
    """Run, and write the page; 0 if every part held."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.kit", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", default="all")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--in-process", help=argparse.SUPPRESS)
    words = parser.parse_args()
    words.out.mkdir(parents=True, exist_ok=True)
    if words.in_process:
        results = run_part(BY_NAME[words.in_process], words.device, words.out)
        return 1 if results.faults else 0
    try:
        parts = chosen(words.parts)
    except ValueError as problem:
        parser.error(str(problem))
    if words.device == "cuda" and facts.gpu_name() is None:
        print("no NVIDIA GPU here; --device cpu runs the same parts without one")
        return 2
    facts.write(words.out, words.device, sys.argv[1:])
    seconds = words.seconds or (SECONDS if words.device == "cuda" else 3600.0)
    is_good = run_all(parts, words.device, words.out.absolute(), seconds)
    target = words.page or words.out / "gpu.md"
    target.write_text(page.page(words.out))
    print(target)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
