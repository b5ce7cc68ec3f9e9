"""Missing or different parts, as reported by a running gateway."""

from __future__ import annotations

import aiohttp

ANSWER_S = 5.0


async def incomplete(gateway_url: str) -> str | None:
    """Return the reason for missing offloading; None if there is none, or it is unknown."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            # A part of our own, asked by its address: its certificate is of another name.
            http.get(f"{gateway_url}/health?full=1", ssl=False) as reply,
        ):
            if reply.status == 200:
                return None
            answer = await reply.json()
            return str(answer["error"]["message"])
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
        return None
