"""Layouts that engines have announced to this pool node: sizes and dtype planes of their blocks."""

from __future__ import annotations

from prfaas.core.kv.blocks import CacheGroup, Layout

LAYOUTS_MAX = 64
"""Layouts remembered at once; the one that was announced first is forgotten."""


class KnownLayouts:
    """Cache groups by layout and index. Blocks outlive their engine, and so does this.

    `learn` is for one thread, `group` for any.
    """

    def __init__(self) -> None:
        self._groups: dict[bytes, dict[int, CacheGroup]] = {}

    def learn(self, layout: Layout) -> None:
        """Remember a layout."""
        self._groups[layout.layout_id] = {group.index: group for group in layout.groups}
        while len(self._groups) > LAYOUTS_MAX:
            del self._groups[next(iter(self._groups))]

    def group(self, layout_id: bytes, index: int) -> CacheGroup | None:
        """Return a cache group; None if no engine has announced it."""
        return self._groups.get(layout_id, {}).get(index)
