"""Invariants of stateful classes: each `validate` method requires its own."""

from __future__ import annotations


def require(holds: bool, what: str) -> None:
    """Require that something holds.

    Raises:
        AssertionError: It does not; the message is `what`.
    """
    if not holds:
        raise AssertionError(what)
