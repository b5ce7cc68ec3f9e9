"""Break transfers between two real pool nodes, and count what did not hold.

python -m tests.drill [--faults 200] [--seed 1] [--keep DIRECTORY] [--codec raw|auto|always]
    [--encryption tls|sealed|network] [--lanes 4] [--quality fp8]
"""

import argparse
import asyncio
import collections
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path

from prfaas.core.codec.codecs import LinkCodec, Quality
from prfaas.core.transfer.link_encryption import LinkEncryption

from .drill import Kind, Protocol, Round, run


def table(rounds: list[Round]) -> str:
    """Markdown: one line a kind of fault."""
    lines = [
        "| fault | times | at the source | at the destination | blocks: pushed / served / older "
        "| at rest after, median / most | problems |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in Kind:
        mine = [one for one in rounds if one.kind is kind]
        if mine:
            lines.append(_line(kind, mine))
    return "\n".join(lines)


def _line(kind: Kind, rounds: list[Round]) -> str:
    def ends(states: list[str]) -> str:
        return ", ".join(f"{n} {s}" for s, n in sorted(collections.Counter(states).items())) or "-"

    source = ends([state for one in rounds for state in one.source_states])
    destination = ends([state for one in rounds for state in one.destination_states])
    seconds = [one.seconds for one in rounds]
    blocks = f"{sum(r.num_blocks for r in rounds)} / {sum(r.num_served for r in rounds)}"
    blocks += f" / {sum(r.num_older for r in rounds)}"
    problems = sum(len(one.problems) for one in rounds)
    return (
        f"| {kind} | {len(rounds)} | {source} | {destination} | {blocks} "
        f"| {statistics.median(seconds):.1f} s / {max(seconds):.1f} s | {problems} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="where logs stay; a directory made for it")
    parser.add_argument("--codec", type=LinkCodec, choices=LinkCodec, default=LinkCodec.RAW)
    parser.add_argument(
        "--encryption", type=LinkEncryption, choices=LinkEncryption, default=LinkEncryption.TLS
    )
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--quality", type=Quality, choices=Quality, default=Quality.LOSSLESS)
    arguments = parser.parse_args()
    protocol = Protocol(arguments.codec, arguments.encryption, arguments.lanes, arguments.quality)
    logging.basicConfig(level=logging.ERROR)
    began = time.monotonic()

    def tell(one: Round) -> None:
        print(f"{one.kind}: {'; '.join(one.problems) or 'good'}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.keep or Path(scratch)
        directory.mkdir(exist_ok=True)
        rounds = asyncio.run(run(directory, arguments.faults, arguments.seed, tell, protocol))
    print(table(rounds))
    print(
        f"\n{len(rounds)} faults, seed {arguments.seed}, codec {protocol.codec}, "
        f"{protocol.encryption}, {protocol.lanes} lanes, {protocol.quality}, "
        f"{time.monotonic() - began:.0f} s"
    )
    return any(one.problems for one in rounds)


if __name__ == "__main__":
    sys.exit(main())
