"""The tickets that the gateway signs: for every transfer, exactly what may move."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prfaas.core.codec.codecs import Quality
from prfaas.core.kv.blocks import Layout
from prfaas.core.kv.shipping import Manifest, manifest_digest, shipped_bytes
from prfaas.core.kv.tenant_salts import tenant_tag
from prfaas.core.transfer.tickets import LIFETIME_MAX_NS, Ticket
from prfaas.gateway.routing.transfer_tracker import TransferView
from prfaas.gateway.tenancy.tenants import Tenant
from prfaas.wire.tickets import TicketSigner


@dataclass(frozen=True, slots=True)
class TicketOffice:
    """Issues tickets.

    Attributes:
        lifetime_ns: How long a transfer may take from now on, prefill included.
        is_in_site: Return True if two pools are hosts of one cluster: between them no tenant's
            rate is limited.
        on_signed: Called with each ticket, the tenant's name and the class of service.
    """

    signer: TicketSigner
    tenants: Mapping[str, Tenant]
    lifetime_ns: int
    is_in_site: Callable[[str, str], bool] = lambda *_: False
    unix_ns: Callable[[], int] = time.time_ns
    on_signed: Callable[[Ticket, str, str], None] = lambda *_: None

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
        """A ticket for the blocks of a prompt that the destination lacks.

        Args:
            transfer: Between which pools, and its id.
            layout: Of the blocks.
            blocks: The list of them.
            have_tokens: Usable prefix that the destination holds already.
            final_tokens: Length at which it will resume.
            quality: Class of the blocks; between hosts of a cluster nothing is rounded.

        Returns:
            The sealed ticket in Base64.
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
        self.on_signed(ticket, tenant_name, transfer.service)
        return base64.b64encode(self.signer.seal(ticket)).decode()
