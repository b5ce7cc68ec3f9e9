"""Orders to pools: tickets, each for exactly what may move, and prefixes to fetch.

Hot prefixes are fetched for whoever asks next (`loops/replication.py`), others for one request
(`serving/prefill_leg.py`). Blocks travel as in every pull: the destination's pool node asks the
source over the link that the source keeps to it.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from prfaas.core.codec.codecs import Quality
from prfaas.core.facts import FactStream
from prfaas.core.kv.blocks import Layout
from prfaas.core.kv.shipping import Manifest, manifest_digest, manifest_of_keys, shipped_bytes
from prfaas.core.kv.tenant_salts import tenant_tag
from prfaas.core.request.facts import PrefixCopied, TicketSigned
from prfaas.core.transfer.tickets import LIFETIME_MAX_NS, Prefix, Ticket
from prfaas.gateway.routing.transfer_tracker import TransferView
from prfaas.gateway.tenancy.tenants import Tenant
from prfaas.wire.messages.fields import PULL_KEYS_MAX, wire_keys
from prfaas.wire.messages.link import Ahead, Pull
from prfaas.wire.tickets import TicketSigner


@dataclass(frozen=True, slots=True)
class TicketOffice:
    """Issues tickets."""

    signer: TicketSigner
    tenants: Mapping[str, Tenant]
    lifetime_ns: int
    """Time that a transfer may take from now on, prefill included."""
    is_in_site: Callable[[str, str], bool] = lambda *_: False
    """Return True if two pools are hosts of one cluster: between them no tenant's rate is
    limited."""
    unix_ns: Callable[[], int] = time.time_ns
    facts: FactStream = field(default_factory=FactStream)

    def issue(
        self,
        transfer: TransferView,
        layout: Layout,
        tenant_name: str,
        blocks: Manifest,
        *,
        have_tokens: int,
        final_tokens: int,
        quality: Quality = Quality.LOSSLESS,
    ) -> str:
        """A ticket for the blocks of a prompt that the destination lacks; returns the sealed ticket
        in Base64.

        Args:
            transfer: Between which pools, and its id.
            layout: Of the blocks.
            blocks: The list of them.
            have_tokens: Usable prefix that the destination holds already.
            final_tokens: Length at which it will resume.
            quality: Class of the blocks; between hosts of a cluster nothing is rounded.
        """
        tenant = self.tenants[tenant_name]
        is_in_site = self.is_in_site(transfer.source, transfer.destination)
        ticket = Ticket(
            transfer_id=transfer.transfer_id,
            tenant=tenant_tag(tenant.cache_salt),
            weight=tenant.link_weight,
            bytes_per_s=0 if is_in_site else tenant.link_bytes_per_s,
            layout_id=layout.layout_id,
            source=transfer.source,
            destination=transfer.destination,
            blocks=manifest_digest(blocks),
            bytes_max=shipped_bytes(layout, have_tokens=have_tokens, final_tokens=final_tokens),
            expires_at_ns=self.unix_ns() + min(self.lifetime_ns, LIFETIME_MAX_NS),
            trace=transfer.trace,
            regions=tenant.regions,
            quality=Quality.LOSSLESS if is_in_site else quality,
        )
        self.facts.report(TicketSigned(ticket, tenant_name, transfer.service))
        return base64.b64encode(self.signer.seal(ticket)).decode()


class NotAsked(StrEnum):
    """Reason why no pool was asked to fetch a prefix."""

    POOL_DOWN = "pool_down"
    TOO_MANY_BLOCKS = "too_many_blocks"


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Asks pools to fetch prefixes."""

    tickets: TicketOffice
    """Sign what may move."""
    send: Callable[[str, Pull], bool]
    """Sends a pull to a pool; False if it is not connected."""

    def copy(self, transfer: TransferView, prefix: Prefix, have_tokens: int) -> NotAsked | None:
        """Fetch a prefix for whoever asks next, as `fetch` does."""
        refused = self.fetch(transfer, prefix, have_tokens)
        if refused is None:
            copied = PrefixCopied(transfer.source, transfer.destination, prefix.hashes)
            self.tickets.facts.report(copied)
        return refused

    def fetch(
        self, transfer: TransferView, prefix: Prefix, have_tokens: int, ahead: Ahead = Ahead.NO
    ) -> NotAsked | None:
        """Have the destination of a transfer fetch the missing blocks of a prefix; returns none if
        it was asked.

        Args:
            transfer: Between which pools, and its id.
            prefix: Blocks to fetch.
            have_tokens: Usable part of it that the destination holds already.
            ahead: COMPUTING if an engine has yet to store them.
        """
        keys = list(prefix.keys(have_tokens))
        if len(keys) > PULL_KEYS_MAX:
            return NotAsked.TOO_MANY_BLOCKS
        span = {"have_tokens": have_tokens, "final_tokens": prefix.num_tokens}
        blocks = manifest_of_keys(keys)
        ticket = self.tickets.issue(
            transfer, prefix.layout, prefix.tenant, blocks, **span, quality=prefix.quality
        )
        pull = Pull(
            transfer_id=transfer.transfer_id,
            source=transfer.source,
            keys=wire_keys(keys),
            ticket=base64.b64decode(ticket),
            blocks=blocks,
            ahead=ahead,
        )
        return None if self.send(transfer.destination, pull) else NotAsked.POOL_DOWN
