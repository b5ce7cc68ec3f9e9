"""Both PD engines are killed while prompts are tokenised.

    python -m tests.drill.dying

Ninety texts of 12,000 characters at once, to two PrfaaS and two PD timing engines. The PD engines
are killed after the first answers. Prints the number of answers by status; a 400 would blame the
client for an engine that is gone.
"""

import asyncio
import collections
import signal
import sys
import tempfile
from pathlib import Path

from tests.deployments import ROOT

from .site import DECODE, MODEL, PREFILL, write_files
from .streams import Streams, streaming

NUM, NUM_CHARS, NUM_FIRST = 90, 12_000, 3
WORDS_MAX = 60


async def status_of(streams: Streams, number: int) -> str:
    """Status of the answer to a text that nobody has sent, and the error."""
    text = f"[{number}] " + (ROOT / "LICENSE").read_text() * 2
    body = {"model": MODEL, "prompt": text[:NUM_CHARS], "max_tokens": 4}
    async with streams.http.post(f"{streams.url}/v1/completions", json=body) as reply:
        answer = await reply.json()
    if reply.status == 200:
        return "200"
    return f"{reply.status}: {str(answer['error']['message'])[:WORDS_MAX]}"


async def drill(local: Path) -> list[str]:
    """Lines of the table."""
    async with streaming(write_files(local, PREFILL)) as (streams, supervisor):
        asked = [asyncio.create_task(status_of(streams, number)) for number in range(NUM)]
        while sum(each.done() for each in asked) < NUM_FIRST:
            await asyncio.wait(asked, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
        for name in DECODE:
            supervisor.part(name).signal(signal.SIGKILL)
        found = collections.Counter(await asyncio.gather(*asked))
    return [f"| {status} | {number} |" for status, number in sorted(found.items())]


if __name__ == "__main__":
    print("| answer | requests |\n|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        print("\n".join(asyncio.run(drill(Path(scratch)))))
    sys.exit(0)
