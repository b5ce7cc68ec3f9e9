"""Agreement on the protection of a link."""

from __future__ import annotations

import pytest

from prfaas.core.transfer.link_encryption import WIRE_NAMES, LinkEncryption, agreed, offered

SEALED, TLS, NETWORK = LinkEncryption.SEALED, LinkEncryption.TLS, LinkEncryption.NETWORK


@pytest.mark.parametrize(
    ("sender", "receiver", "expected"),
    [
        (SEALED, SEALED, SEALED),
        (SEALED, NETWORK, SEALED),
        (NETWORK, SEALED, SEALED),
        (NETWORK, NETWORK, NETWORK),
        (TLS, SEALED, TLS),
        (TLS, NETWORK, TLS),
        (SEALED, TLS, TLS),
        (NETWORK, TLS, TLS),
        (TLS, TLS, TLS),
    ],
)
def test_blocks_are_readable_only_if_both_ends_chose_that(
    sender: LinkEncryption, receiver: LinkEncryption, expected: LinkEncryption
) -> None:
    assert agreed(receiver, offered(sender)) is expected


def test_an_older_sender_and_unknown_names_get_tls() -> None:
    assert agreed(SEALED, []) is TLS
    assert agreed(NETWORK, ["sealed-2", "plain"]) is TLS
    assert agreed(SEALED, ["sealed-2", WIRE_NAMES[SEALED]]) is SEALED
