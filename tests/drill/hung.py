"""A PrfaaS engine is stopped (SIGSTOP) under load, in a deployment without a plan.

    python -m tests.drill.hung

Long prompts only, two a second, to two PrfaaS and two PD timing engines; `policy` is "paper", which
sends all of them away, and `plan` is not set. Prints the times to first token before the stop, and
of the requests that the stopped engine got.
"""

import asyncio
import signal
import sys
import tempfile
from pathlib import Path

from .site import PREFILL, write_files
from .streams import Sent, Streams, at, streaming

PER_S = 2.0
NUM_BEFORE, NUM_AFTER = 30, 40
TOKENS = 3000, 7000


def without_plan(local: Path) -> Path:
    """The drill's deployment as somebody writes it who has no plan."""
    file = write_files(local, PREFILL)
    lines = file.read_text().splitlines()
    routing = lines.index("[routing]")
    ours = [n for n, line in enumerate(lines) if line.startswith(("policy =", "plan ="))]
    drop = {n for n in ours if routing < n < routing + 5}
    kept = [line for n, line in enumerate(lines) if n not in drop]
    kept.insert(kept.index("[routing]") + 1, 'policy = "paper"')
    file.write_text("\n".join(kept))
    return file


async def hit(streams: Streams, sent: list[Sent]) -> list[Sent]:
    """Those that were sent to the stopped engine in vain; all others run without a fallback."""
    records = await streams.records()
    return [each for each in sent if records[each.request_id]["fallback"]]


async def drill(local: Path) -> list[str]:
    """Lines of the table."""
    async with streaming(without_plan(local)) as (streams, supervisor):
        await streams.send(NUM_BEFORE, PER_S, lambda chance: chance.randint(*TOKENS))
        before = list(streams.sent)
        engine = supervisor.part(PREFILL[0])
        engine.signal(signal.SIGSTOP)
        try:
            await streams.send(NUM_AFTER, PER_S, lambda chance: chance.randint(*TOKENS))
        finally:
            engine.signal(signal.SIGCONT)
        after = streams.sent[NUM_BEFORE:]
        affected = await hit(streams, after)
        records = await streams.records()
    reasons = {str(records[each.request_id]["fallback"]) for each in affected}
    rows = [("before", before), ("after", after), ("sent to the stopped engine", affected)]
    assert all(each.status == 200 for each in streams.sent)
    return [
        f"| {name} | {len(sent)} | {at(sent, 0.5):.2f} s | {at(sent, 1.0):.2f} s |"
        for name, sent in rows
    ] + sorted(reasons)


if __name__ == "__main__":
    print("| requests | number | median TTFT | longest TTFT |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        print("\n".join(asyncio.run(drill(Path(scratch)))))
    sys.exit(0)
