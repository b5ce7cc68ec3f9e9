"""Checks of what has to hold between two calls of an object with state.

`validate` of a class names its invariants. Tests call it when they end; the product never does.
"""

from __future__ import annotations


def hold(**invariants: bool) -> None:
    """Check invariants, each named by the words of its keyword.

    Raises:
        AssertionError: Some do not hold; the message has all of them.
    """
    broken = [name.replace("_", " ") for name, holds in invariants.items() if not holds]
    if broken:
        raise AssertionError("does not hold: " + ", ".join(broken))
