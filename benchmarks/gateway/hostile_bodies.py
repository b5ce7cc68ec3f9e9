"""Bodies that cost their sender little: what they cost a gateway and the proxy of a shared site.

python -m benchmarks.gateway.hostile_bodies http://127.0.0.1:8000

Sends bodies of 4 MB that inflate to 4 GB to a gateway that runs, without a key, one after another
for ten seconds, and asks it for `/version` all that time: prints the longest and the median answer,
with and without the attack. Then reads a prefill of 30 MiB as the proxy does: prints the CPU time,
and the longest time for which nothing else could run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import statistics
import time
import zlib

import aiohttp
import msgspec

from prfaas.proxy.bodies import read_prefill

SECONDS = 10.0
GIB_EACH = 4
PROMPT_TOKENS = 3_900_000


def bomb() -> bytes:
    """Four gigabytes of zeros, packed; its end is missing."""
    packer, piece = zlib.compressobj(9, wbits=31), bytes(1 << 20)
    head = packer.compress(piece) + packer.flush(zlib.Z_FULL_FLUSH)
    packer = zlib.compressobj(9, wbits=-15)
    rest = packer.compress(piece) + packer.flush(zlib.Z_FULL_FLUSH)
    return head + rest * ((GIB_EACH << 10) - 1)


async def attack(url: str, data: bytes, answers: list[float]) -> None:
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with aiohttp.ClientSession() as http:
        while True:
            began = time.perf_counter()
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(f"{url}/health", data=io.BytesIO(data), headers=headers) as it:
                    await it.read()
            answers.append(time.perf_counter() - began)


async def others(url: str) -> list[float]:
    """Times of answers to somebody else, seconds."""
    times, end = [], time.perf_counter() + SECONDS
    async with aiohttp.ClientSession() as http:
        while (began := time.perf_counter()) < end:
            async with http.get(f"{url}/version") as reply:
                await reply.read()
            times.append(time.perf_counter() - began)
            await asyncio.sleep(0.01)
    return times


async def gateway(url: str) -> None:
    data = bomb()
    for attackers in (0, 2):
        answers: list[float] = []
        tasks = [asyncio.create_task(attack(url, data, answers)) for _ in range(attackers)]
        times = await others(url)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        print(
            f"{attackers} attackers, {len(answers)} bodies of {len(data) / 1e6:.1f} MB: others "
            f"wait {1000 * statistics.median(times):.1f} ms, at most {1000 * max(times):.0f} ms"
        )


async def proxy() -> None:
    body = msgspec.json.encode(
        {"model": "m", "prompt": [123456] * PROMPT_TOKENS, "cache_salt": "s", "max_tokens": 1}
    )
    began = time.thread_time()
    prefill = read_prefill(body)
    read_s = time.thread_time() - began
    pieces, began = [], time.thread_time()
    checking = asyncio.create_task(prefill.check_tokens())
    while not checking.done():
        before = time.thread_time()
        await asyncio.sleep(0)
        pieces.append(time.thread_time() - before)
    checked_s = time.thread_time() - began
    print(
        f"a prefill of {len(body) / 2**20:.0f} MiB: {1000 * read_s:.0f} ms of CPU until it is "
        f"refused; accepted, {1000 * checked_s:.0f} ms more in pieces of at most "
        f"{1000 * max(pieces):.1f} ms"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    asyncio.run(gateway(parser.parse_args().url))
    asyncio.run(proxy())
