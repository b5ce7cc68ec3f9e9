"""Immutable records of which every decision makes several.

A record is a `msgspec.Struct`. Compared with a `NamedTuple`, it is made in a third of the time, and
its fields are read in a third of the time.
"""

from __future__ import annotations

from typing import Any, Self

from msgspec import Struct
from msgspec.structs import replace


class Record(Struct, frozen=True):
    """Named fields with types. It is equal to a record of the same type with equal fields."""

    def _replace(self, **changes: Any) -> Self:
        """Return a copy with other values of some fields, as a named tuple does; TypeError if there
        is no such field."""
        return replace(self, **changes)
