"""A source with a good certificate and bad blocks."""

import asyncio
import random
import secrets
import ssl
from pathlib import Path

from prfaas.core.blocks import BlockKey
from prfaas.core.link_share import Fragment, OutgoingBlock
from prfaas.wire.channel import Channel
from prfaas.wire.fragments import encode_prefix
from prfaas.wire.frames import BlockFrame, block_digest
from prfaas.wire.identity import identity_in
from prfaas.wire.messages import Join, Offer, PoolHello, Resumed, decode, encode

from .engine import content
from .processes import LOOPBACK

NAME = "prfaas-pool"
CLOSED_S = 20.0


async def forge(identities: Path, port: int, layout_id: bytes, chance: random.Random) -> None:
    """Bring a block whose bytes are not what its digest says, and wait to be thrown out.

    The real source loses its link to this, as a pool has one link; it dials anew.
    """
    tls = identity_in(identities, NAME).dialling()
    closed, welcomed = asyncio.Event(), asyncio.Event()
    link, transfer = secrets.token_hex(16), secrets.token_bytes(16)

    def take(_: Channel, frame: object) -> None:
        if isinstance(decode(frame.payload), Resumed):  # type: ignore[attr-defined]
            welcomed.set()

    _, channel = await asyncio.get_running_loop().create_connection(
        lambda: Channel(take, lambda *_: closed.set()), LOOPBACK, port, ssl=tls.messages
    )
    channel.send(PoolHello(pool=NAME, epoch="forged", link=link))
    async with asyncio.timeout(CLOSED_S):
        await welcomed.wait()
    channel.send(Offer(transfer_id=transfer))
    key = BlockKey(0, chance.randbytes(32))
    block = _damaged(transfer, layout_id, key, chance)
    if chance.random() < 0.5:
        channel.send_block(
            BlockFrame(transfer, layout_id, block.name[1], block.digest, bytearray(block.data))
        )
    else:
        await _send_fragments(tls.data, port, link, block)
    try:
        async with asyncio.timeout(CLOSED_S):
            await closed.wait()
    except TimeoutError:
        raise AssertionError("who brings damaged blocks is not thrown out") from None
    finally:
        channel.close("done")


def _damaged(
    transfer: bytes, layout_id: bytes, key: BlockKey, chance: random.Random
) -> OutgoingBlock:
    data = bytearray(content(key))
    digest = block_digest(layout_id, key, data)
    match chance.randrange(3):
        case 0:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        case 1:
            key = BlockKey(key.group, chance.randbytes(32))
        case _:
            del data[-1]
    return OutgoingBlock(transfer, (layout_id, key), digest, data)


async def _send_fragments(tls: ssl.SSLContext, port: int, link: str, block: OutgoingBlock) -> None:
    _, writer = await asyncio.open_connection(LOOPBACK, port, ssl=tls)
    writer.write(encode(Join(pool=NAME, link=link)))
    step = 128 << 10
    for offset in range(0, len(block.data), step):
        fragment = Fragment(block, offset, min(step, len(block.data) - offset))
        writer.write(encode_prefix(fragment) + fragment.data)
    await writer.drain()
    writer.close()
