"""The engines that pool nodes have now, asked for with the gateway's identity."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from functools import partial

from prfaas.errors import PeerError
from prfaas.wire.channel import Channel
from prfaas.wire.frames import Frame
from prfaas.wire.identity import peer_name
from prfaas.wire.messages.base import Goodbye
from prfaas.wire.messages.codec import decode
from prfaas.wire.messages.survey import Survey, Surveyed
from prfaas.wire.sockets import happy_eyeballs_s

ANSWER_S = 5.0
"""Limit for connection, handshake and answer of one pool node."""


async def survey(
    pools: Mapping[str, tuple[str, int]], tls: ssl.SSLContext, answer_s: float = ANSWER_S
) -> dict[str, Surveyed | str]:
    """Ask pool nodes for their engines, all at once; returns by pool, its answer or the reason that
    there is none.

    Args:
        tls: Context of a gateway that these pool nodes accept, for dialling.
        answer_s: Limit for each, seconds.
    """
    found = await asyncio.gather(
        *(_ask(name, address, tls, answer_s) for name, address in pools.items())
    )
    return dict(zip(pools, found, strict=True))


async def _ask(
    pool: str, address: tuple[str, int], tls: ssl.SSLContext, answer_s: float
) -> Surveyed | str:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Surveyed | str] = loop.create_future()

    def settle(value: Surveyed | str) -> None:
        if not answer.done():
            answer.set_result(value)

    channel = Channel(
        partial(_received, settle),
        lambda _, reason: settle(f"{reason}; a pool node of an older prfaas does not answer"),
        partial(_opened, pool),
    )
    try:
        async with asyncio.timeout(answer_s):
            await loop.create_connection(
                lambda: channel,
                *address,
                ssl=tls,
                happy_eyeballs_delay=await happy_eyeballs_s(*address),
            )
            return await answer
    except TimeoutError:
        return f"no answer within {answer_s:g} s"
    except OSError as error:
        return str(error)
    finally:
        channel.close("prfaas check has its answer")


def _opened(pool: str, channel: Channel) -> None:
    channel.peer = peer_name(channel.ssl_object, frozenset({pool}))
    channel.send(Survey())


def _received(settle: Callable[[Surveyed | str], None], _: Channel, frame: Frame) -> None:
    match decode(frame.payload):
        case Surveyed() as message:
            settle(message)
        case Goodbye() as message:
            raise PeerError(message.reason)
        case _:
            return
