"""Codes of the Mooncake Store library, and what they mean for a tier."""

from __future__ import annotations

from prfaas.errors import TransferError

NO_SPACE, NOT_FOUND, EXISTS = -200, -704, -705
NOT_READY, LEASE_EXPIRED = -703, -707
GONE = frozenset({NOT_FOUND, NOT_READY, LEASE_EXPIRED})
"""The store answers, and does not have the object (any more, or completely)."""
_WORDS = {
    -1: "internal error",
    NO_SPACE: "no provider has room",
    -800: "a provider does not answer",
    -900: "the master does not answer",
}


def check(code: int) -> int:
    """Return a code that is no failure of the store.

    Raises:
        TransferError: It is one.
    """
    if code >= 0 or code in GONE or code in (NO_SPACE, EXISTS):
        return code
    raise TransferError(f"{_WORDS.get(code, 'the library failed')} (code {code})")
