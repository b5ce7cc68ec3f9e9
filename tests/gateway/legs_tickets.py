"""Tickets as engines get them."""

from __future__ import annotations

import base64
import time
from pathlib import Path
from typing import Any

from prfaas.core.transfer.tickets import Ticket
from prfaas.wire.tickets import TicketOpener


def ticket_of(call: Any, identities: Path) -> tuple[dict[str, Any], Ticket]:
    order = call.body["kv_transfer_params"]["prfaas"]
    opener = TicketOpener(identities / "ca.pem", frozenset({"gateway"}))
    return order, opener.open(base64.b64decode(order["ticket"]), time.time_ns())
