"""The connections of a link at its sending end: dialled, kept warm, and listened to.

A link is one connection for messages, on the node's event loop, and several data connections on its
lanes. It is up while both kinds stand. What is sent over them: `outbound_link.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import ssl
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from prfaas.core.facts import FactStream
from prfaas.core.transfer import events as on
from prfaas.core.transfer.facts import LinksChanged
from prfaas.core.transfer.link_encryption import WIRE_NAMES, offered
from prfaas.core.transfer.sender import Sender
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.errors import PeerError, words_of
from prfaas.logs import log_event
from prfaas.pool.net.link_end import Destination, LinkEnd
from prfaas.pool.send.data_sender import DataSenders, LinkSession, SendQueue
from prfaas.pool.send.link_coding import LinkCoding
from prfaas.pool.send.link_control import LinkControl
from prfaas.pool.tickets.ticket_checks import TicketChecks
from prfaas.tasks import cancel_all
from prfaas.wire.allow_list import peer_regions
from prfaas.wire.channel import Channel, keep_alive
from prfaas.wire.frames import Frame
from prfaas.wire.identity import LinkContexts, peer_name
from prfaas.wire.messages.base import Goodbye, Message, Ping, Pong, Unsupported
from prfaas.wire.messages.codec import ToSender, decode, tags_of
from prfaas.wire.messages.fields import keys_of
from prfaas.wire.messages.link import (
    Abort,
    Accepted,
    Arrived,
    Committed,
    Connections,
    Decodes,
    PoolHello,
    Pull,
    Refused,
    Resumed,
)
from prfaas.wire.sealed.keys import SECRET_BYTES, LinkSecret
from prfaas.wire.sockets import happy_eyeballs_s, prepare_messages, tcp_info

log = logging.getLogger(__name__)

RETRY_MIN_S, RETRY_MAX_S = 0.1, 1.0
REFUSED_RETRY_MAX_S = 10.0
"""A peer that refuses us does so until its settings change."""
STABLE_S = 5.0
"""After a connection that lasted this long, the next attempt follows immediately."""
CONNECT_TIMEOUT_S = 5.0
PATH_S = 3600.0
"""Time for which is remembered whether the path lets data connections without TLS through."""
_CODECS = "blocks go raw; install 'prfaas[codecs]' at the peer to code them"


class DialledLink(Protocol):
    """The transfers of a link, and what it does with its connections."""

    machine: Sender
    queue: SendQueue
    coding: LinkCoding
    control: LinkControl

    def report(self, event: on.TransferInput) -> None:
        """Report what happened to transfers, and do what follows."""

    def asked(self, pull: Pull) -> None:
        """Send the blocks that the peer requests."""

    def end(self) -> None:
        """End all transfers: the peer may not have more."""


class Dialer:
    """Keeps one link up, and handles the messages of its peer.

    Args:
        link: Its transfers.
        tickets: Know the regions of peers.
        facts: Gets `LinksChanged` when the link comes up or goes down.
    """

    def __init__(
        self,
        link: DialledLink,
        end: LinkEnd,
        to: Destination,
        tls: LinkContexts,
        tickets: TicketChecks,
        facts: FactStream,
    ) -> None:
        self._link, self._end, self._to, self._tls = link, end, to, tls
        self._tickets, self._facts = tickets, facts
        self._encryptions: list[str] = []
        """Protections beside TLS that the present connection offers."""
        self._tls_only_until_s = self._proved_until_s = 0.0
        self._channel: Channel | None = None
        self._senders: DataSenders | None = None
        self._word = ""
        """Identifies the present connection for messages."""
        self._session: LinkSession | None = None
        self._welcome = asyncio.Event()
        self._refusal = ""
        self._lost = ""
        self._numbers = itertools.count()
        self._was_up = False

    @property
    def is_up(self) -> bool:
        """Return True if blocks can be sent to the peer, and it is the expected one."""
        return (
            self._channel is not None
            and self._channel.is_open
            and self._senders is not None
            and self._senders.num_open > 0
        )

    @property
    def is_welcome(self) -> bool:
        """Return True if the peer has said what it has, so that messages about transfers make
        sense."""
        return self._welcome.is_set()

    def send(self, message: Message) -> None:
        """Send it if there is a connection; important messages are repeated on the next one."""
        if self._channel is not None:
            self._channel.send(message)

    async def run(self) -> None:
        """Keep the link up until cancelled."""
        delay, said = RETRY_MIN_S, ""
        loop = asyncio.get_running_loop()
        while True:
            closed = asyncio.Event()
            began, reason, self._refusal, self._lost = loop.time(), "", "", ""
            try:
                await self._connect(closed)
                await self._serve(closed)
            except (OSError, ssl.SSLError, TimeoutError) as error:
                reason = words_of(error)
            finally:
                was_welcome = self.is_welcome
                self._disconnect()
            if self._refusal:
                reason = f"it refuses us: {self._refusal}"
            elif not was_welcome:
                reason = reason or self._lost
            if reason and reason != said:
                log.warning("link to %s: no connection, tried again: %s", self._to.peer, reason)
            said = "" if was_welcome else reason
            most = REFUSED_RETRY_MAX_S if self._refusal and not was_welcome else RETRY_MAX_S
            delay = RETRY_MIN_S if loop.time() - began > STABLE_S else min(2 * delay, most)
            await asyncio.sleep(delay)

    async def _connect(self, closed: asyncio.Event) -> None:
        def lost(_: Channel, reason: str) -> None:
            if self.is_welcome:
                log_event(log, logging.WARNING, "link_down", peer=self._to.peer, why=reason)
            self._lost = reason
            closed.set()
            self.update()

        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, self._channel = await loop.create_connection(
                lambda: Channel(self._on_frame, lost, self._greet),
                *self._to.address,
                ssl=self._tls.messages,
                happy_eyeballs_delay=await happy_eyeballs_s(*self._to.address),
            )

    def _greet(self, channel: Channel) -> None:
        if channel.socket is not None:
            prepare_messages(channel.socket)
        peer = channel.peer = peer_name(channel.ssl_object, self._to.expected)
        if self._tickets.met(peer, peer_regions(channel.ssl_object)):
            self._link.end()
        self._word = secrets.token_hex(16)
        is_tls_only = asyncio.get_running_loop().time() < self._tls_only_until_s
        self._encryptions = [] if is_tls_only else offered(self._end.encryption)
        hello = PoolHello(
            pool=self._end.pool,
            epoch=self._end.epoch,
            resumes=list(self._link.machine.open),
            link=self._word,
            codecs=self._link.coding.offered,
            encryptions=self._encryptions,
            takes=tags_of(ToSender),
        )
        channel.send(hello)

    async def _serve(self, closed: asyncio.Event) -> None:
        channel = self._channel
        if channel is None or not channel.is_open:
            return
        tasks = [asyncio.create_task(keep_alive(channel))]
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if not await self._until_welcome(closed):
                    return
            senders = self._senders = self._open_data(channel)
            tasks.append(asyncio.create_task(self._link.control.measure(channel, senders)))
            await closed.wait()
        finally:
            channel.close("this pool node stops")
            try:
                await cancel_all(tasks)
            finally:
                if self._senders is not None:
                    await self._senders.close()

    async def _until_welcome(self, closed: asyncio.Event) -> bool:
        """Wait for the peer's list of its blocks; False if it disconnects first."""
        waits = [asyncio.create_task(event.wait()) for event in (self._welcome, closed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self._welcome.is_set() and not closed.is_set()

    def _open_data(self, channel: Channel) -> DataSenders:
        connection, session = channel.socket, self._session
        if connection is None or session is None:
            raise OSError("the connection for messages is gone")
        # The address that answered: of several, others may be dead, or of another pool node.
        to = replace(self._to, address=connection.getpeername()[:2])
        link = self._link
        senders = DataSenders(
            self._end, to, session, self._tls.data, link.queue, link.coding, self._numbers, self
        )
        link.control.begin(senders, tcp_info(connection).rtt_ns)
        return senders

    def _disconnect(self) -> None:
        session, senders = self._session, self._senders
        if session and session.secret and senders:
            until_s = asyncio.get_running_loop().time() + PATH_S
            if senders.secret is None:
                self._tls_only_until_s = until_s
            elif senders.is_proved:
                self._proved_until_s = until_s
        self._channel = self._senders = self._session = None
        self._link.control.end()
        self._link.coding.agree(())
        self._welcome.clear()
        self.update()

    def update(self) -> None:
        """Report if the link came up or went down."""
        if self.is_up == self._was_up:
            return
        self._was_up = self.is_up
        peer = self._to.peer
        if self._was_up:
            log_event(log, logging.INFO, "link_up", peer=peer)
        self._end.metrics.link_up.labels(peer=peer).set(self._was_up)
        self._facts.report(LinksChanged())
        self._link.report(on.LinkUp(peer) if self._was_up else on.LinkBroke(peer))

    # --- messages of the peer ---

    def _agree(self, codecs: Sequence[str]) -> None:
        self._link.coding.agree(codecs)
        if not codecs:
            log_event(log, logging.INFO, "peer_without_codecs", peer=self._to.peer, hint=_CODECS)

    def _on_frame(self, channel: Channel, frame: Frame) -> None:
        message, link, peer = decode(frame.payload), self._link, self._to.peer
        match message:
            case Ping() | Unsupported():
                return
            case Goodbye():
                self._refusal = message.reason
                channel.close(message.reason)
            case Pong():
                link.control.answered(message)
            case Resumed():
                self._resume(message)
            case Connections():
                link.control.allow(message.num_max)
            case Decodes():
                self._agree(message.codecs)
            case Arrived():
                names = tuple((message.layout_id, key) for key in keys_of(message.keys))
                link.report(on.ArrivedCame(peer, message.transfer_id, names=names))
            case Pull():
                link.asked(message)
            case Accepted():
                link.report(on.AcceptedCame(peer, message.transfer_id))
            case Committed():
                link.report(on.CommittedCame(peer, message.transfer_id))
            case Refused() | Abort():
                kind = message.kind if isinstance(message, Abort) else TransferEnd.REFUSED
                why = message.reason
                link.report(on.AbortCame(peer, message.transfer_id, kind=kind, reason=why))
            case _:
                raise PeerError(f"{type(message).__name__} has no meaning on a link")

    def _resume(self, resumed: Resumed) -> None:
        """Continue with the blocks that the peer does not have, protected as it says; PeerError if
        there can be no keys of its secret."""
        peer, secret = self._to.peer, None
        if resumed.encryption and resumed.encryption not in self._encryptions:
            raise PeerError(f"{peer} selects protection {resumed.encryption!r}, not offered")
        for encryption, name in WIRE_NAMES.items():
            if name == resumed.encryption:
                if len(resumed.secret) != SECRET_BYTES:
                    raise PeerError(f"{peer} sends a secret of {len(resumed.secret)} bytes")
                ends = self._end.pool, peer, self._word
                secret = LinkSecret(encryption, *ends, resumed.secret)
        is_proved = asyncio.get_running_loop().time() < self._proved_until_s
        self._session = LinkSession(self._word, secret, resumed.connections, is_proved)
        self._link.coding.takes_ages = resumed.takes_ages
        self._welcome.set()
        self._link.report(on.LinkCame(peer, epoch=resumed.epoch))
