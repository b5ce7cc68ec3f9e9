"""Layouts that engines have announced to this pool node: sizes and dtype planes of their blocks."""

from __future__ import annotations

from collections.abc import Callable

from prfaas.core.codec.codecs import codec_of
from prfaas.core.kv.blocks import CacheGroup, Layout

LAYOUTS_MAX = 64
"""Layouts remembered at once; the one that was announced first is forgotten."""


class KnownLayouts:
    """Cache groups by layout and index. Blocks outlive their engine, and so does this.

    `learn` is for one thread, `group` for any.

    Args:
        on_codable: Called for each announced layout with blocks that a codec can code.
    """

    def __init__(self, on_codable: Callable[[], None] = lambda: None) -> None:
        self._on_codable = on_codable
        self._groups: dict[bytes, dict[int, CacheGroup]] = {}

    def learn(self, layout: Layout) -> None:
        """Remember a layout."""
        self._groups[layout.layout_id] = {group.index: group for group in layout.groups}
        while len(self._groups) > LAYOUTS_MAX:
            del self._groups[next(iter(self._groups))]
        if any(codec_of(group.planes) for group in layout.groups):
            self._on_codable()

    def groups(self) -> list[tuple[bytes, int]]:
        """Layout id and index of every known cache group."""
        return [(layout, index) for layout, there in self._groups.items() for index in there]

    def group(self, layout_id: bytes, index: int) -> CacheGroup | None:
        """Return a cache group; None if no engine has announced it."""
        return self._groups.get(layout_id, {}).get(index)
