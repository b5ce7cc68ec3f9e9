"""Refusals in the audit log: one record each up to a limit, then counts."""

from __future__ import annotations

from prfaas.units import NS_PER_S

EACH_MAX = 20
WINDOW_NS = 10 * NS_PER_S
KEYS_MAX = 64
"""Different refusals in a window; more are counted as one."""

Key = tuple[str, ...]


class RefusalCounts:
    """Bounds the records of refusals, without losing their number.

    Args:
        each_max: Refusals with the same key in a window that get a record each.
    """

    def __init__(self, each_max: int = EACH_MAX, window_ns: int = WINDOW_NS) -> None:
        self._each_max, self._window_ns = each_max, window_ns
        self._counts: dict[Key, int] = {}
        self._since_ns = 0

    def take(self, key: Key, now_ns: int) -> bool:
        """Count a refusal; return True if it gets a record of its own."""
        if not self._counts:
            self._since_ns = now_ns
        if key not in self._counts and len(self._counts) >= KEYS_MAX:
            key = ()
        self._counts[key] = self._counts.get(key, 0) + 1
        return bool(key) and self._counts[key] <= self._each_max

    def counted(self, now_ns: int, *, is_end: bool = False) -> list[tuple[Key, int]]:
        """Return refusals without a record, with their number, at the end of a window.

        Args:
            is_end: True to end the window now.
        """
        if not self._counts or not (is_end or now_ns - self._since_ns >= self._window_ns):
            return []
        found = [(key, self._hidden(key, count)) for key, count in self._counts.items()]
        self._counts.clear()
        return [(key, hidden) for key, hidden in found if hidden > 0]

    def _hidden(self, key: Key, count: int) -> int:
        return count - self._each_max if key else count
