"""Checks of what has to hold between two calls of an object with state.

`validate` of a class names its invariants. Tests call it when they end; the product never does.
"""

from __future__ import annotations

from collections.abc import Iterable


def hold(**invariants: bool) -> None:
    """Check invariants, each named by the words of its keyword.

    Raises:
        AssertionError: Some do not hold; the message has all of them.
    """
    broken = [name.replace("_", " ") for name, holds in invariants.items() if not holds]
    if broken:
        raise AssertionError("does not hold: " + ", ".join(broken))


def check_invariants(found: Iterable[tuple[str, bool]]) -> None:
    """Check what has to hold: a name of each, and whether it does.

    Raises:
        AssertionError: One does not.
    """
    for what, holds in found:
        require(holds, what)


def require(holds: bool, what: str) -> None:
    """Check one thing that has to hold.

    Raises:
        AssertionError: It does not.
    """
    if not holds:
        raise AssertionError(what)
