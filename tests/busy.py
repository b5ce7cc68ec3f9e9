"""Runs a command beside a busy loop on every core: python -m tests.busy COMMAND..."""

from __future__ import annotations

import os
import subprocess
import sys


def main(command: list[str]) -> int:
    loops = [
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        return subprocess.run(command, check=False).returncode
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
