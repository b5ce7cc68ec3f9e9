"""Peers that follow the members of the deployment: a pool node dials those that join."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from prfaas.config.addresses import join_address, split_address
from prfaas.core.membership.machine import Membership
from prfaas.core.membership.members import Listed, Member, MemberKind
from prfaas.logs import log_event
from prfaas.membership.follower import MembershipFollower
from prfaas.membership.peer_entries import CLUSTERLESS, PeerClusters
from prfaas.membership.port import Source
from prfaas.pool.node.link_room import Peers

OPTIONS = "options"
"""Source of the peers that the command line names; they never change."""
_log = logging.getLogger(__name__)


class PeerMembers:
    """Dials pool nodes that join, and closes the links to those that leave once they are idle.

    A pool node that leaves is not refused new transfers before that: gateways decide what is sent,
    and what they have sent must not be lost.

    Args:
        peers: Of this pool node.
        clusters: Whose pool nodes they are.
        start: Members at the start, as the source "file" lists them; their links exist.
    """

    def __init__(
        self,
        peers: Peers,
        clusters: PeerClusters,
        sources: Sequence[Source],
        start: Sequence[Listed] = (),
    ) -> None:
        self._peers, self._clusters, settings = peers, clusters, peers.settings
        listed = {each.member.name for each in start}
        given = [
            Listed(Member(name, MemberKind.POOL, CLUSTERLESS, join_address(address)))
            for name, address in settings.peers.items()
            if name not in listed
        ]
        self._fixed = settings.sources - listed, settings.hosts - listed
        machine = Membership(clusters.site)
        now_ns = time.monotonic_ns()
        machine.begin("file", [each for each in start if self._is_peer(each.member)], now_ns)
        machine.begin(OPTIONS, given, now_ns)
        self.follower = MembershipFollower(machine, self, sources, self._is_peer)
        peers.metrics.on_read, peers.can_grow = self._show, True

    def start(self) -> None:
        """Begin to follow the sources."""
        self.follower.start()

    async def close(self) -> None:
        """Stop; links stay."""
        await self.follower.close()

    # --- actions of the machine ---

    def join(self, member: Member) -> bool:
        """Dial a member, or let it push; False if it is connected already."""
        self._admit()
        if member.cluster in self._clusters.targets:
            if member.name in self._peers.links:
                return False
            settings = dict(member.settings)
            self._peers.add(
                member.name,
                split_address(member.address),
                int(settings.get("budget", 0)),
                int(settings.get("connections", 0)),
            )
        return True

    def withhold(self, name: str, *, withheld: bool) -> None:
        """Nothing: gateways give it nothing new."""

    def leave(self, member: Member) -> None:
        """Close the link to a member, and forget it."""
        self._peers.remove(member.name)
        self._admit()
        # A successor of this name may be connected already.
        if self.follower.machine.state_of(member.name) is None:
            self._peers.dismiss(member.name)

    def is_idle(self, member: Member) -> bool:
        """Return True if no transfer uses a member."""
        # Blocks under its name are those of its successor, once one waits.
        has_successor = self.follower.machine.is_awaited(member.name)
        return self._peers.is_idle(member.name, inbound=not has_successor)

    def note(self, action: str, what: str, why: str) -> None:
        """Log a change."""
        level = logging.WARNING if action == "refused" else logging.INFO
        log_event(_log, level, f"peer_{action}", peer=what, why=why)

    def _show(self) -> None:
        for member in self.follower.machine.members():
            self.follower.well(member.name, is_well=self._peers.is_up(member.name))
        self._peers.metrics.members.show(self.follower)

    def _admit(self) -> None:
        sources, hosts = (set(names) for names in self._fixed)
        for member in self.follower.machine.members():
            if member.cluster in self._clusters.sources:
                sources.add(member.name)
                if member.cluster in self._clusters.targets:
                    hosts.add(member.name)
        self._peers.admit(sources, hosts)

    def _is_peer(self, member: Member) -> bool:
        is_near = member.cluster in self._clusters.targets | self._clusters.sources
        return (
            member.kind is MemberKind.POOL and member.name != self._peers.settings.name and is_near
        )
