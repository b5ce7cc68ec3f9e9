"""Pulls as gateways ask for them."""

import secrets
from typing import Any

from prfaas.core.kv.blocks import BlockKey
from prfaas.core.kv.shipping import manifest_digest, manifest_of_keys
from prfaas.wire.messages.fields import wire_keys
from prfaas.wire.messages.link import Pull

from .conftest import World
from .sites import (
    seal,
)


def a_pull(world: World, keys: list[BlockKey], **ticket: Any) -> Pull:
    transfer, blocks = secrets.token_bytes(16), manifest_of_keys(keys)
    sealed = seal(world.identities, transfer, blocks=manifest_digest(blocks), **ticket)
    named = wire_keys(keys)
    return Pull(
        transfer_id=transfer, source="prfaas-pool", keys=named, ticket=sealed, blocks=blocks
    )
