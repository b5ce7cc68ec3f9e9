"""A source with a good certificate and bad blocks."""

import asyncio
import random
import secrets
import ssl
import time
from pathlib import Path

from prfaas.core.codec.codecs import Quality
from prfaas.core.kv.blocks import BlockKey
from prfaas.core.kv.shipping import manifest_digest, manifest_of_keys
from prfaas.core.transfer.link_scheduler import Fragment, OutgoingBlock
from prfaas.core.transfer.tickets import Ticket
from prfaas.wire.channel import Channel
from prfaas.wire.fragments import block_digest, encode_prefix
from prfaas.wire.identity import identity_in
from prfaas.wire.messages.codec import decode, encode
from prfaas.wire.messages.link import Join, Offer, PoolHello, Resumed
from prfaas.wire.tickets import TicketSigner

from .engine import BLOCK_BYTES, LAYOUT, content
from .processes import LOOPBACK

NAME = "prfaas-pool"
CLOSED_S = 20.0
TICKET_NS = 120 * 10**9


def seal(
    identities: Path,
    transfer: bytes,
    keys: list[BlockKey],
    quality: Quality = Quality.LOSSLESS,
) -> bytes:
    """A gateway's ticket for exactly these blocks."""
    size = sum(BLOCK_BYTES[key.group] for key in keys)
    expires_at_ns = time.time_ns() + TICKET_NS
    ends, blocks = (NAME, "pd-pool"), manifest_digest(manifest_of_keys(keys))
    ticket = Ticket(
        transfer, "t", LAYOUT.layout_id, *ends, blocks, size, expires_at_ns, quality=quality
    )
    return TicketSigner(identity_in(identities, "gateway")).seal(ticket)


async def forge(identities: Path, port: int, chance: random.Random) -> None:
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
    key = BlockKey(0, chance.randbytes(32))
    sealed, blocks = seal(identities, transfer, [key]), manifest_of_keys([key])
    channel.send(Offer(transfer_id=transfer, ticket=sealed, blocks=blocks))
    block = _damaged(transfer, LAYOUT.layout_id, key, chance)
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
