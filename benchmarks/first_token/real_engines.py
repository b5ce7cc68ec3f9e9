"""TTFT over the lab's WAN with real vLLM engines, with early first tokens and without. Needs root.

    python -m benchmarks.first_token.real_engines [--rate 1] [--rtt-ms 40] [--tokens 2000]
        [--requests 100]

vLLM on the CPU with a small model in float32 at both ends. One request after the other, with and
without in turns; each answer has to be that of one engine. Prints a table in Markdown.
"""

import argparse
import asyncio
import json
import random
import secrets
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.case_study.load import ready
from benchmarks.two_sites import AWAY, HOME
from prfaas.cli.deploy.topology import Topology, parts
from prfaas.cli.host.processes import ProcessPart
from prfaas.config.addresses import join_address
from tests.deployments import LAPTOP, laid_out, placed
from tests.lab.wan import Side, Wan, why_not
from tests.live.conftest import document
from tests.live.first_tokens import settings
from tests.live.model_kinds import KINDS, make_kind

OUTPUT_TOKENS, READY_S = 8, 1800
SIDES: dict[str, Side] = {
    "prfaas-pool": AWAY,
    "prfaas-engine": AWAY,
    "pd-pool": HOME,
    "pd-engine": HOME,
    "gateway": HOME,
}
NAMES = {"first": "TTFT", "second": "second token", "end": "end", "gap": "largest later gap"}


@dataclass(frozen=True)
class Asked:
    """Times of one request since it was sent, seconds."""

    first: float
    second: float
    end: float
    gap: float


def asked_of(times: Sequence[float]) -> Asked:
    """Return the figures of a stream.

    Args:
        times: Of its events since it was asked for, at least three, seconds.
    """
    return Asked(times[0], times[1], times[-1], float(np.diff(times[1:]).max()))


def table(found: Mapping[int, Sequence[Sequence[Asked]]]) -> str:
    """Medians by length of the prompt, tokens, of requests without and with early tokens."""
    lines = ["| prompt | figure, P50 | without | with | change |", "|---|---|---|---|---|"]
    for length, both in found.items():
        for field, name in NAMES.items():
            old, new = (statistics.median(getattr(each, field) for each in runs) for runs in both)
            lines.append(
                f"| {length:,} | {name} | {old:.3f} s | {new:.3f} s | {new / old - 1:+.1%} |"
            )
    return "\n".join(lines)


def moved(part: ProcessPart, topology: Topology, wan: Wan) -> ProcessPart:
    """Return a part that runs at its site, and reaches the others at theirs."""
    side = SIDES.get(part.name, HOME)
    places = {name: join_address(address) for name, address in topology.pools.items()}
    places |= {name: url.removeprefix("http://") for name, url in topology.engines.items()}
    args = list(part.command.args)
    if "--host" in args:
        args[args.index("--host") + 1] = wan.address(side)
    for name, place in places.items():
        port = place.rpartition(":")[2]
        args = [arg.replace(place, f"{wan.address(SIDES[name])}:{port}") for arg in args]
    args = ["ip", "netns", "exec", wan.namespace(side), *args]
    return replace(part, command=replace(part.command, args=args))


@asynccontextmanager
async def two_sites(wan: Wan, place: Path) -> AsyncIterator[Topology]:
    """Start a deployment over a link; it may take minutes until it is ready."""
    make_kind(next(iter(KINDS)), place / "model")
    topology = await laid_out(*placed(LAPTOP, place, settings()))
    started = list[ProcessPart]()
    try:
        for part in (part for stage in parts(topology) for part in stage):
            started.append(moved(part, topology, wan))
            started[-1].start()
        yield topology
    finally:
        await asyncio.gather(*(part.stop() for part in reversed(started)))


async def ask(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[str, Asked]:
    """Text and times of a streamed answer."""
    text, times, began = "", list[float](), time.monotonic()
    async with http.post(f"{url}/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            if line.startswith(b"data: {"):
                text += "".join(each["text"] for each in json.loads(line[6:])["choices"])
                times.append(time.monotonic() - began)
        path = reply.headers.get("X-Prfaas-Path", "remote"), reply.headers.get("X-Prfaas-Fallback")
    assert path == ("remote", None), path
    return text, asked_of(times)


async def client(gateway: str, engine: str, model: str, num_tokens: int, count: int) -> None:
    """Within the site of the gateway: the times of each request, as JSON."""
    draw, found = random.Random(num_tokens), [list[Asked](), list[Asked]()]
    async with aiohttp.ClientSession() as http:
        await ready(http, gateway, READY_S)
        for number in range(2 * count + 2):
            salt, is_early = secrets.token_hex(6), number % 2 == 1
            prompt = f"{salt} " + document(num_tokens - 13, start=draw.randrange(5000))
            body = {"model": model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "stream": True}
            body |= {"temperature": 0, "ignore_eos": True}
            # With an empty list the answer is left to one engine, and is the same.
            text, asked = await ask(http, gateway, body if is_early else body | {"bad_words": []})
            expected, _ = await ask(http, engine, body | {"cache_salt": salt})
            assert text == expected, (number, text, expected)
            found[is_early].append(asked)
            if number % 20 == 0:
                print(f"{number} of {2 * count}", file=sys.stderr, flush=True)
    json.dump([[astuple(asked) for asked in each[1:]] for each in found], sys.stdout)


async def measure(
    bits_per_s: int, rtt_ms: float, lengths: list[int], count: int
) -> list[list[list[Asked]]]:
    """Times by length, without and with early tokens.

    Args:
        lengths: Of prompts, tokens.
        count: Requests of each kind and length; one more opens connections.
    """
    found = []
    with tempfile.TemporaryDirectory(prefix="first-token-") as place:
        async with (
            Wan(rtt_ms=rtt_ms, rate_bits_per_s=bits_per_s) as wan,
            two_sites(wan, Path(place)) as topology,
        ):
            port = topology.engines["pd-engine"].rpartition(":")[2]
            engine = f"http://{wan.address(HOME)}:{port}"
            for length in lengths:
                command = [sys.executable, "-m", "benchmarks.first_token.real_engines"]
                command += [topology.gateway_url, engine, topology.deployment.model.name]
                command += [str(length), str(count)]
                run = await wan.run(HOME, command, stdout=asyncio.subprocess.PIPE)
                output, _ = await run.communicate()
                if run.returncode:
                    raise SystemExit("the client failed: its error is on standard error")
                found.append([[Asked(*each) for each in kind] for kind in json.loads(output)])
    return found


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=1.0, help="of the link, Gbit/s")
    parser.add_argument("--rtt-ms", type=float, default=40.0)
    parser.add_argument("--tokens", type=int, default=2000, help="of a prompt")
    parser.add_argument("--requests", type=int, default=100, help="with and without, each")
    parser.add_argument("client", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        gateway, engine, model, *numbers = options.client
        asyncio.run(client(gateway, engine, model, *map(int, numbers)))
        return
    if why_not():
        raise SystemExit(why_not())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    lengths = [options.tokens]
    run = measure(round(options.rate * 1e9), options.rtt_ms, lengths, options.requests)
    found = dict(zip(lengths, asyncio.run(run), strict=True))
    print(f"{options.rate:g} Gbit/s, {options.rtt_ms:g} ms, {options.requests} requests each\n")
    print(table(found))


if __name__ == "__main__":
    main()
