"""Time to decode and check the body of a chat, in turns of 2,000 tokens and of 20.

    python -m benchmarks.gateway.bodies [--tokens 32000]

Prints the least of many rounds, and of it the JSON alone, which `msgspec` decodes either way.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

from prfaas.gateway.openai.requests import Api, parse_object, parse_request

ROUNDS = 300
CHARS_PER_TOKEN = 4


def body(num_tokens: int, turn_tokens: int) -> bytes:
    """A chat with tools; every second turn is in parts."""
    text = "word " * (turn_tokens * CHARS_PER_TOKEN // 5)
    contents = (text, [{"type": "text", "text": text}])
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": contents[i % 2]}
        for i in range(num_tokens // turn_tokens)
    ]
    function = {"name": "find", "parameters": {"type": "object", "properties": {}}}
    fields = {"temperature": 0.5, "max_tokens": 64, "stream": True, "n": 1, "stop": ["x"]}
    tools = [{"type": "function", "function": function}] * 20
    return json.dumps({"messages": messages, "tools": tools, **fields}).encode()


def least_us(work: Callable[[], object]) -> float:
    """Least time of a call, us."""
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return 1e6 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32_000)
    num_tokens = parser.parse_args().tokens
    for turn_tokens in (2000, 20):
        data = body(num_tokens, turn_tokens)
        both = least_us(lambda: parse_request(data, Api.CHAT, "m", 1000))  # noqa: B023
        alone = least_us(lambda: parse_object(data))  # noqa: B023
        print(
            f"{num_tokens // turn_tokens:5} messages, {len(data):,} bytes: {both:6.0f} us, "
            f"JSON {alone:6.0f} us, checks {both - alone:6.0f} us"
        )


if __name__ == "__main__":
    main()
