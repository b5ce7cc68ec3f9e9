"""The paper's case study, live, beside what planner and simulator say. Needs root.

    python -m benchmarks.case_study [--designs ours,homogeneous,naive] [--json FILE]

Prints tables in Markdown. Ctrl-C leaves nothing behind.
"""

import argparse
import asyncio
import json
import signal
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.lab.wan import why_not

from .designs import Phase, case_study, requests, windows
from .live import Scale, run
from .simulated import simulate
from .table import Case, tables

PHASES = [Phase(0.5, 35), Phase(0.8, 50), Phase(1.25, 90)]
WARM_S = 20.0
"""Of the last phase, until its throughput counts: the time for queues to form."""
SCALE = Scale(bytes=0.01, time=1.0, rtt_ms=20)
SEED = 5


async def measure(keys: list[str], phases: list[Phase], scale: Scale, seed: int) -> list[Case]:
    question, designs = case_study()
    end = sum(phase.seconds for phase in phases)
    bits_per_s = question.problem.prfaas[0].link.bits_per_s
    cases = []
    for design in designs:
        if design.key not in keys:
            continue
        asked = requests(question.problem, design, phases, seed)
        simulated = simulate(
            question, design, requests(question.problem, design, phases, seed), end,
            scale.rtt_ms / 1e3,
        )  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="case-study-") as place:
            live = await run(design, asked, end, scale, bits_per_s, Path(place))
        cases.append(Case(design, simulated, live))
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--designs", default="ours,homogeneous,naive")
    parser.add_argument("--time-scale", type=float, default=SCALE.time)
    parser.add_argument("--phases", help="such as 0.5:40,0.8:60,1.25:90: load and seconds")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--json", type=Path, help="what came out, request by request")
    options = parser.parse_args()
    if why_not():
        raise SystemExit(why_not())
    # Whoever stops us gets namespaces and processes cleaned up as well.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    phases = PHASES
    if options.phases:
        pairs = [part.split(":") for part in options.phases.split(",")]
        phases = [Phase(float(load), float(seconds)) for load, seconds in pairs]
    scale = Scale(SCALE.bytes, options.time_scale, SCALE.rtt_ms)
    cases = asyncio.run(measure(options.designs.split(","), phases, scale, options.seed))
    if options.json:
        options.json.write_text(json.dumps([asdict(case) for case in cases], default=str))
    print(tables(cases, windows(phases, WARM_S), scale))


if __name__ == "__main__":
    main()
