"""TTFT of offloaded requests over the lab's WAN, with early first tokens, with relay decode, and
without. Needs root.

    python -m benchmarks.first_token [--rate 1] [--rtt-ms 40] [--tokens 8192,32768] [--requests 8]

Timing engines at the sizes of the paper, bytes and link scaled; one request after the other, of
each kind in turns forth and back, each answer checked token by token. Prints a table in Markdown.
"""

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import astuple, dataclass
from pathlib import Path

import aiohttp
import numpy as np

from benchmarks.case_study.live import BUDGET_SHARE
from benchmarks.case_study.load import TOKENS, ready
from benchmarks.two_sites import AWAY, GATEWAY, HOME, PLAN, TwoSites, prepare
from prfaas.engines.timing.api.vocabulary import Vocabulary
from prfaas.engines.timing.blocks import DrawnAnswer
from prfaas.planner.answer.plan_loader import load_question
from prfaas.planner.hardware.profiles import step_time
from prfaas.units import NS_PER_S
from tests.lab.wan import Wan, why_not

MODEL, OUTPUT_TOKENS, BYTES_SCALE = "timing-1t", 320, 0.05
ENGINE = (
    "--bytes-scale",
    str(BYTES_SCALE),
    "--block-tokens",
    "512",
    "--host-memory",
    "64MiB",
    "--stream-interval",
    "1",
)
KINDS: dict[str, dict[str, float]] = {
    # Timing engines take no notice of sampling. A penalty leaves the answer to one engine; a greedy
    # one is not relayed.
    "without": {"temperature": 0, "frequency_penalty": 0.1},
    "first token": {"temperature": 0},
    "relay": {"temperature": 0.7},
}


@dataclass(frozen=True)
class Asked:
    """Times of one request since it was sent, seconds; the longest time between two tokens, and
    that from the last token of its relay to the next, in steps of decode; and the relay's tokens.
    """

    first: float
    second: float
    end: float
    gap: float
    handover: float
    relayed: float


async def ask(
    http: aiohttp.ClientSession, prompt: list[int], words: Vocabulary, kind: str
) -> Asked | None:
    """None if the request was not offloaded: a busy machine misses health checks."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    answer, text, times, began = DrawnAnswer(prompt), "", [], time.monotonic()
    async with http.post(
        f"http://{GATEWAY}/v1/completions", json=body | {"stream": True} | KINDS[kind]
    ) as reply:
        if reply.headers.get("X-Prfaas-Path") != "remote":
            await reply.read()
            return None
        async for line in reply.content:
            if line.startswith(b"data: {"):
                assert b'"choices"' in line, line
                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
                times.append(time.monotonic() - began)
    assert text == "".join(words.texts[answer.next(words.spoken)] for _ in range(OUTPUT_TOKENS))
    async with http.get(f"http://{GATEWAY}/control/requests") as reply:
        [record, *_] = (await reply.json())["requests"]
    step_ns = step_time(load_question(PLAN).problem.pd.decode)(1, len(prompt))
    steps = np.diff(times) * NS_PER_S / step_ns
    relayed = record["relayed_tokens"]
    return Asked(times[0], times[1], times[-1], steps.max(), steps[relayed], relayed)


async def client(tokenizer: str, num_tokens: int, count: int) -> None:
    """Within the site of the gateway: the times of each request, as JSON."""
    rng, words = np.random.default_rng(num_tokens), Vocabulary(tokenizer)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:
        await ready(http, f"http://{GATEWAY}", limit_s=300)
        found: list[list[tuple[float, ...]]] = [[] for _ in KINDS]
        kinds = list(zip(found, KINDS, strict=True))
        for number in range(count + 1):
            # After a longer pause BBR looks for the shortest round trip within the transfer.
            for times, kind in kinds[:: 1 if number % 2 else -1]:
                asked = None
                while asked is None:
                    prompt = rng.integers(0, TOKENS, num_tokens).tolist()
                    asked = await ask(http, prompt, words, kind)
                times.append(astuple(asked))
    json.dump([each[1:] for each in found], sys.stdout)  # The first one opens connections.


async def measure(options: argparse.Namespace, lengths: list[int]) -> list[list[list[Asked]]]:
    rate = round(options.rate * 1e9 * BYTES_SCALE)
    with tempfile.TemporaryDirectory(prefix="first-token-") as place:
        prepare(Path(place))
        async with Wan(rtt_ms=options.rtt_ms, rate_bits_per_s=rate) as wan:
            sites = TwoSites(wan, Path(place), MODEL)
            await sites.start_pool(HOME, "1GiB", "127.0.0.1:0")
            await sites.start_engines(HOME, ["pd-0"], *ENGINE)
            budget = f"pd-pool={round(rate * BUDGET_SHARE)}bps" if options.budget else ""
            limit = ["--link-budget", budget] if budget else []
            await sites.start_pool(AWAY, "1GiB", "127.0.0.1:0", *limit)
            await sites.start_engines(AWAY, ["prfaas-0"], *ENGINE)
            routing = ["offload_threshold = 1000", 'policy = "remote"', 'transfer_timeout = "60s"']
            await sites.start_gateway(routing, {AWAY: {"prfaas-0": ""}, HOME: {"pd-0": ""}})
            found = []
            for length in lengths:
                command = [sys.executable, "-m", "benchmarks.first_token", "--client"]
                command += [str(sites.tokenizer), "--tokens", str(length)]
                command += ["--requests", str(options.requests)]
                run = await wan.run(HOME, command, stdout=asyncio.subprocess.PIPE)
                output, _ = await run.communicate()
                if run.returncode:
                    raise SystemExit(f"the client failed; logs are in {place}")
                found.append([[Asked(*each) for each in kind] for kind in json.loads(output)])
    return found


def table(lengths: list[int], found: list[list[list[Asked]]]) -> str:
    lines = [f"| prompt | figure, P50 | {' | '.join(KINDS)} |", "|---|---|---|---|---|"]
    names = {
        "first": ("TTFT, s", ".2f"),
        "second": ("second token, s", ".2f"),
        "end": ("end, s", ".2f"),
        "gap": ("longest gap, decode steps", ".1f"),
        "handover": ("gap at the hand-over, decode steps", ".1f"),
        "relayed": ("relayed tokens", ".0f"),
    }
    for length, kinds in zip(lengths, found, strict=True):
        for field, (name, form) in names.items():
            each = [statistics.median(getattr(a, field) for a in runs) for runs in kinds]
            shown = [format(value, form) for value in each]
            if field in ("first", "second", "end"):
                changed = zip(shown[1:], each[1:], strict=True)
                shown[1:] = [f"{text} ({value / each[0] - 1:+.1%})" for text, value in changed]
            lines.append(f"| {length:,} | {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=1.0, help="of the link, Gbit/s")
    parser.add_argument("--rtt-ms", type=float, default=40.0)
    parser.add_argument("--tokens", default="8192,32768")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument(
        "--no-budget", dest="budget", action="store_false",
        help="of the link: have its pool node find out what it carries",
    )  # fmt: skip
    parser.add_argument("--client", help=argparse.SUPPRESS)
    options = parser.parse_args()
    lengths = [int(length) for length in options.tokens.split(",")]
    if options.client:
        asyncio.run(client(options.client, lengths[0], options.requests))
        return
    if why_not():
        raise SystemExit(why_not())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found = asyncio.run(measure(options, lengths))
    print(f"{options.rate:g} Gbit/s, {options.rtt_ms:g} ms, {options.requests} requests each\n")
    print(table(lengths, found))


if __name__ == "__main__":
    main()
