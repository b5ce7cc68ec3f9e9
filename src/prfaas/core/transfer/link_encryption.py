"""Protection of the data connections of a link: the operator's choice, and what two ends agree on.

Messages always travel over mutually authenticated TLS 1.3, and the ends agree there. Nobody on the
path can lower what they agree on.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class LinkEncryption(StrEnum):
    """Protection of the blocks on a link (`link_encryption`)."""

    SEALED = "sealed"
    """Every fragment sealed by AES-256-GCM, with keys from the message connection."""
    TLS = "tls"
    """TLS 1.3 on every data connection."""
    NETWORK = "network"
    """Authenticated and checked for integrity (GMAC), but readable on the path. For networks that
    encrypt by themselves."""


WIRE_NAMES = {LinkEncryption.NETWORK: "network-1", LinkEncryption.SEALED: "sealed-1"}
"""Names in the hello of a link; another record format would have another name. TLS has none: every
pool node can."""
_USABLE = {
    LinkEncryption.TLS: (),
    LinkEncryption.SEALED: (LinkEncryption.SEALED,),
    LinkEncryption.NETWORK: (LinkEncryption.NETWORK, LinkEncryption.SEALED),
}
"""By the operator's choice: what else than TLS may be used, the preferred first."""


def offered(choice: LinkEncryption) -> list[str]:
    """Return the names for the hello of a sender with this choice."""
    return [WIRE_NAMES[usable] for usable in _USABLE[choice]]


def agreed(choice: LinkEncryption, names: Iterable[str]) -> LinkEncryption:
    """Return the protection that a receiver with this choice selects.

    Blocks go readable only if both ends chose that, and by TLS if one end chose TLS or is older.

    Args:
        names: Of the sender's hello.
    """
    known = frozenset(names)
    for usable in _USABLE[choice]:
        if WIRE_NAMES[usable] in known:
            return usable
    return LinkEncryption.TLS
