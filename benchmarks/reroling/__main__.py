"""A day whose load changes its mix, live with timing engines: roles that change beside fixed ones.

    python -m benchmarks.reroling [--only on|off] [--seed N] [--policy POLICY] [--day SECONDS]

Both runs get the same requests, and so does the simulator. Prints tables in Markdown. Ctrl-C
leaves nothing behind.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import tempfile
from pathlib import Path

from .day import requests
from .live import live
from .outcome import Run, Settings
from .simulated import simulate
from .table import tables


def measure(settings: Settings, which: list[bool], keep: Path | None) -> list[Run]:
    """Live and simulated runs, in pairs."""
    runs = []
    for reroling in which:
        with tempfile.TemporaryDirectory(prefix="reroling-") as scratch:
            place = (keep or Path(scratch)) / ("on" if reroling else "off")
            place.mkdir(parents=True)
            asked = requests(settings.day_s, settings.seed)
            runs.append(asyncio.run(live(settings, asked, place, reroling=reroling)))
        asked = requests(settings.day_s, settings.seed)
        runs.append(simulate(settings, asked, reroling=reroling))
    return runs


def main() -> None:
    usual = Settings()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("on", "off"), help="one of both runs")
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--policy", default=usual.policy)
    parser.add_argument("--day", type=float, default=usual.day_s, help="length of the day, s")
    parser.add_argument("--dwell", type=float, default=usual.dwell_s, help="reroling_dwell, s")
    parser.add_argument("--keep", type=Path, help="new folder where logs stay")
    options = parser.parse_args()
    # Whoever stops us gets processes cleaned up as well.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = Settings(options.day, options.dwell, options.policy, options.seed)
    which = {"on": [True], "off": [False], None: [True, False]}[options.only]
    print(tables(measure(settings, which, options.keep), settings))


if __name__ == "__main__":
    main()
