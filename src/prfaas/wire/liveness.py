"""Detection of silent peers."""

from __future__ import annotations

import asyncio

from prfaas.wire.channel import Channel
from prfaas.wire.messages.base import Ping

PING_INTERVAL_S = 1.0
SILENCE_MAX_S = 5.0
"""A path that carries nothing for this long is dead: five lost pings in a row."""


async def keep_alive(
    channel: Channel,
    *,
    ping_interval_s: float = PING_INTERVAL_S,
    silence_max_s: float = SILENCE_MAX_S,
) -> None:
    """Ping the peer, and close the channel after silence. Ends with the channel."""
    loop = asyncio.get_running_loop()
    while channel.is_open:
        if loop.time() - channel.heard_at > silence_max_s:
            channel.close(f"silent for {silence_max_s:.0f} s")
            return
        channel.send(Ping())
        await asyncio.sleep(ping_interval_s)
