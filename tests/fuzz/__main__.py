"""Random bytes and mutated valid streams, into the codecs and into a running pool node's port.

python -m tests.fuzz [--random-bytes 10000000] [--mutated 100000] [--port-mutated 100000]
    [--data-streams 2000]
"""

import argparse
import asyncio
import random
import resource
import tempfile
import time
from pathlib import Path

from prfaas.core.transfer.link_encryption import LinkEncryption

from .links import Attacker, a_site
from .port import attack
from .streams import feed, mutated

CHUNK_BYTES = 20_000


def codecs(num_random_bytes: int, num_mutated: int, seed: int) -> None:
    chance, began = random.Random(seed), time.monotonic()
    for _ in range(num_random_bytes // CHUNK_BYTES):
        feed(chance.randbytes(CHUNK_BYTES), chance)
    good = sum(feed(mutated(chance), chance) for _ in range(num_mutated))
    print(
        f"codecs: {num_random_bytes} random bytes, {num_mutated} mutated streams "
        f"({good} still valid): only PeerErrors; {time.monotonic() - began:.0f} s, "
        f"resident at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--random-bytes", type=int, default=10_000_000)
    parser.add_argument("--mutated", type=int, default=100_000)
    parser.add_argument("--port-mutated", type=int, default=100_000)
    parser.add_argument(
        "--data-streams", type=int, default=2000, help="data connections by each protection"
    )
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    codecs(arguments.random_bytes, arguments.mutated, arguments.seed)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        attacking = attack(
            Path(directory), arguments.random_bytes, arguments.port_mutated, arguments.seed
        )
        figures = asyncio.run(attacking)
    print(
        f"port of a pool node: {figures.num_streams} connections, {figures.num_bytes} bytes, "
        f"{figures.num_refused} refused; alive and serving; {figures.rss_growth / 2**20:.1f} MiB "
        f"more resident; {time.monotonic() - began:.0f} s"
    )
    for encryption in LinkEncryption:
        asyncio.run(links(encryption, arguments.data_streams, arguments.seed))


async def links(encryption: LinkEncryption, num_streams: int, seed: int) -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        async with a_site(Path(name), encryption) as site:
            figures = await Attacker(site, Path(name), encryption, seed).run(num_streams)
    print(
        f"data connections by {encryption}: {figures.num_streams} streams, {figures.num_bytes} "
        f"bytes, {figures.num_links_ended} links ended, {figures.num_blocks} blocks arrived, all "
        f"right; at most {figures.unfinished_most >> 10} KiB unfinished; resident at most "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB; "
        f"{time.monotonic() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
