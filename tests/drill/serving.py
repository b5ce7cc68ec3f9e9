"""Kill, cut and stall parts of a serving deployment under load, and look at what clients notice.

python -m tests.drill.serving [--per-s 20] [--only KIND ...] [--rounds N] [--gateways 1]
    [--slower 2] [--fresh] [--keep DIRECTORY]

Round number n of a fault sends the requests of seed n, as `tests.drill.simulated` does. With
--fresh every round has processes of its own, which know nothing of an earlier fault: a gateway
that has seen a slow link predicts by what it observed there.
"""

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from prfaas.core.request.watch import WatchAlarm

from .clients import Call, Clients
from .rounds import WHOLE_S, Round, calls_from_now, ended, until_whole
from .site import DECODE, PREFILL, Site, running

PER_S = 20.0
NOTICED_S = 1.0
"""A client that waits so much longer than others did before the fault has noticed it."""


class Kind(StrEnum):
    """A fault."""

    NOTHING = "nothing"
    PREFILL_ENGINE = "kill -9 of a prefill engine"
    DECODE_ENGINE = "kill -9 of a decode engine"
    SOURCE_POOL = "kill -9 of the PrfaaS pool node"
    DESTINATION_POOL = "kill -9 of the PD pool node"
    FROZEN_ENGINE = "decode engine frozen (SIGSTOP)"
    CUT = "link cut"
    SILENT = "link silent"
    """Nothing passes, and no connection ends."""
    SLOW = "link slowed below its plan"
    GATEWAY = "kill -9 of a gateway replica"
    """After the slowed link, which looks for what is still held: what the transfers of a dead
    gateway hold lasts until their tickets' time is over."""
    STALL = "event streams to a gateway stalled"
    ROLL = "rolling restart of gateway, engine, pool node"


@dataclass
class FaultRound(Round):
    """The effect of one fault.

    Attributes:
        kind: The fault.
        late: Requests that left a remote path because it was late.
        retried: Requests that their client sent again, to the other gateway.
        gap_s: Longest silence within a stream from the fault on.
        noticed_s: From the fault to the end of the last request that it touched.
        whole_s: From the repair until every gateway saw every part.
    """

    kind: Kind = Kind.NOTHING
    late: int = 0
    retried: int = 0
    gap_s: float = 0.0
    noticed_s: float = 0.0
    whole_s: float = 0.0

    def see(self, call: Call, record: dict[str, object], began_at_s: float, usual_s: float) -> None:
        """Add a request, which waits `usual_s` without a fault."""
        is_moved, fallback = self.judge(call, record), record.get("fallback")
        self.late += isinstance(fallback, dict) and fallback["reason"] == WatchAlarm.LATE
        self.retried += call.tries > 1
        self.gap_s = max(self.gap_s, call.gap_s)
        has_waited = call.wait_s > usual_s + NOTICED_S or call.gap_s > NOTICED_S
        if is_moved or call.tries > 1 or call.problem or has_waited:
            self.noticed_s = max(self.noticed_s, call.ended_at_s - began_at_s)


@dataclass(frozen=True)
class Times:
    """Of a round, in seconds.

    Attributes:
        quiet_s: Before the fault, and once all is well again.
        broken_s: From the fault to the repair.
        restarts: Whether what was killed is started anew; else it stays away.
        until_late: Slow the link until a path is left for being late, however short the round is.
    """

    quiet_s: float = 4.0
    broken_s: float = 10.0
    restarts: bool = True
    until_late: bool = False


async def strike(site: Site, kind: Kind, times: Times) -> float:
    """Break something, wait, and repair it.

    Returns:
        When the repair began.
    """
    victims = {
        Kind.PREFILL_ENGINE: PREFILL[0],
        Kind.DECODE_ENGINE: DECODE[0],
        Kind.SOURCE_POOL: "prfaas-pool",
        Kind.DESTINATION_POOL: "pd-pool",
        Kind.GATEWAY: "gateway",
    }
    switches: dict[Kind, tuple[Callable[[], None], Callable[[], None]]] = {
        Kind.CUT: (site.cut, site.plug_in),
        Kind.SILENT: (site.silence, site.plug_in),
        Kind.SLOW: (site.slow, site.quicken),
        Kind.STALL: (site.stall, site.flow),
        Kind.FROZEN_ENGINE: (site.freeze, site.thaw),
    }
    if kind in victims:
        site.kill(victims[kind])
        await asyncio.sleep(times.broken_s)
        repaired_at_s = time.monotonic()
        if times.restarts:
            await site.restart(victims[kind])
        return repaired_at_s
    if kind in switches:
        begin, end = switches[kind]
        num_late = await site.num_late()
        begin()
        await asyncio.sleep(times.broken_s)
        if kind is Kind.SLOW and times.until_late:
            await until_late(site, num_late)
        end()
    elif kind is Kind.ROLL:
        await roll(site)
    else:
        await asyncio.sleep(times.broken_s)
    return time.monotonic()


async def roll(site: Site) -> None:
    """Restart one of each kind the way that operators are told to."""
    await site.stop("gateway")
    await site.restart("gateway")
    await until_whole(site)
    await site.drain(DECODE[0], drained=True)
    await site.stop(DECODE[0])
    await site.restart(DECODE[0])
    await site.drain(DECODE[0], drained=False)
    await until_whole(site)
    await site.stop("pd-pool")
    await site.restart("pd-pool")


async def until_late(site: Site, num_before: float) -> None:
    """Wait until a remote path was left for being late; whoever counts them says if none was."""
    ends_at_s = time.monotonic() + WHOLE_S
    while await site.num_late() == num_before and time.monotonic() < ends_at_s:  # noqa: ASYNC110 - processes signal nothing
        await asyncio.sleep(0.1)


async def until_nothing_held(site: Site) -> None:
    """Transfers come and go; what leaks stays."""
    held: dict[str, float] = {}
    try:
        async with asyncio.timeout(WHOLE_S):
            while any((held := await site.held()).values()):  # noqa: ASYNC110 - processes signal nothing
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"after {WHOLE_S} s there are still {held}") from None


async def drill(site: Site, clients: Clients, kind: Kind, times: Times, seed: int) -> FaultRound:
    """One fault, with load before, during and after it."""
    clients.begin(seed)
    await asyncio.sleep(times.quiet_s)
    began_at_s, calls = time.monotonic(), calls_from_now(clients)
    usual_s = max((call.wait_s for call in clients.calls if call.ended_at_s), default=0.0)
    repaired_at_s = await strike(site, kind, times)
    if times.restarts:
        await until_whole(site)
    found = FaultRound(kind=kind, whole_s=time.monotonic() - repaired_at_s)
    await asyncio.sleep(times.quiet_s)
    found.calls = calls()
    records = await ended(site, found.calls)
    if kind is Kind.SLOW:
        await until_nothing_held(site)
    for call in found.calls:
        found.see(call, records.get(call.request_id, {}), began_at_s, usual_s)
    return found


async def run(
    directory: Path,
    kinds: list[Kind],
    per_s: float = PER_S,
    times: Times = Times(),
    prefill: tuple[str, ...] = PREFILL,
    tell: Callable[[FaultRound], None] = lambda _: None,
    seeds: Sequence[int] = (1,),
    num_gateways: int = 2,
    slower: float = 1.0,
) -> list[FaultRound]:
    """Start everything, and drill every kind of fault, a round for each seed.

    Engines that are `slower` get as many requests fewer, so that they are as busy: that leaves more
    time to the processes of a machine that is busy otherwise.
    """
    rounds = []
    async with running(directory, prefill, slower) as site:
        clients = Clients(site.gateways[:num_gateways], site.model)
        for seed, kind in itertools.product(seeds, kinds):
            load = asyncio.create_task(clients.run(per_s / slower))
            try:
                rounds.append(await drill(site, clients, kind, times, seed))
                tell(rounds[-1])
            finally:
                # A round begins without a queue of the one before.
                load.cancel()
                await asyncio.gather(load, return_exceptions=True)
    return rounds


HEAD = (
    "| fault | requests | errors | wrong answers | went on elsewhere | sent again by the client "
    "| longest wait for a first token | longest gap in a stream | last request touched "
    "| all parts there after the repair |\n" + "|---" * 10 + "|"
)


def line(one: FaultRound) -> str:
    """Markdown."""
    moved = f"{one.moved}, {one.late} late" if one.late else one.moved
    cells = [one.kind, len(one.calls), len(one.problems), one.num_wrong, moved, one.retried]
    seconds = [one.wait_s, one.gap_s, one.noticed_s, one.whole_s]
    return "| " + " | ".join([*map(str, cells), *(f"{s:.1f} s" for s in seconds)]) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--per-s", type=float, default=PER_S)
    parser.add_argument("--only", type=Kind, nargs="*", choices=list(Kind), default=list(Kind))
    parser.add_argument("--rounds", type=int, default=1, help="of each fault")
    parser.add_argument("--gateways", type=int, choices=(1, 2), default=2, help="clients use these")
    parser.add_argument("--fresh", action="store_true", help="new processes for each round")
    parser.add_argument("--slower", type=float, default=1.0, help="factor of the engines' times")
    parser.add_argument("--keep", type=Path, help="where logs stay; a directory made for it")
    arguments = parser.parse_args()
    print(HEAD, flush=True)

    def tell(one: FaultRound) -> None:
        print(line(one), flush=True)
        for problem in one.problems:
            print(f"{one.kind}: {problem}", file=sys.stderr)

    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.keep or Path(scratch)
        kinds, seeds = arguments.only, list(range(1, arguments.rounds + 1))
        drills = [(kinds, seeds)]
        if arguments.fresh:
            drills = [([kind], [seed]) for seed, kind in itertools.product(seeds, kinds)]
        rounds: list[FaultRound] = []
        for number, (some, numbers) in enumerate(drills):
            local = directory / str(number)
            local.mkdir(parents=True, exist_ok=True)
            rounds += asyncio.run(
                run(
                    local,
                    some,
                    arguments.per_s,
                    tell=tell,
                    seeds=numbers,
                    num_gateways=arguments.gateways,
                    slower=arguments.slower,
                )
            )
    return any(one.problems for one in rounds)


if __name__ == "__main__":
    sys.exit(main())
