"""Changes of the prefix index that wait to be written together.

A change is a block, by its short key, and a code: source, tier, and whether the block came or left,
as one number. Numpy writes some thousands at once far faster than each by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from prfaas.core.kv.block_table import Keys, Places

PENDING_KEYS_MAX = 4096
"""Changes that wait to be written together."""


class PendingChanges:
    """Changes in the order in which they came."""

    def __init__(self) -> None:
        self._parts: list[tuple[Keys, Places]] = []
        self._num_keys = 0
        self._few: tuple[list[int], list[int]] = [], []
        """Keys and codes of the last few, behind all others."""

    def add(self, keys: Keys, codes: Places) -> bool:
        """Add changes; return True if so many wait that they should be taken now."""
        self._settle()
        self._parts.append((keys, codes))
        self._num_keys += len(keys)
        return self._num_keys >= PENDING_KEYS_MAX

    def add_few(self, keys: list[int], code: int) -> bool:
        """Add the same change of a few blocks; returns as `add`."""
        keys_of_few, codes = self._few
        keys_of_few += keys
        codes += [code] * len(keys)
        return self._num_keys + len(codes) >= PENDING_KEYS_MAX

    def take(self) -> Iterator[tuple[Keys, Places]]:
        """Take all that waits, some thousands at a time and no block twice in one part."""
        self._settle()
        if not self._parts:
            return
        waiting, self._parts, self._num_keys = self._parts, [], 0
        keys = np.concatenate([part for part, _ in waiting])
        codes = np.concatenate([part for _, part in waiting])
        for start in range(0, len(keys), PENDING_KEYS_MAX):
            end = start + PENDING_KEYS_MAX
            yield from _rounds(keys[start:end], codes[start:end])

    def _settle(self) -> None:
        """Put the last few behind the others."""
        (keys, codes), self._few = self._few, ([], [])
        if keys:
            self._parts.append((np.array(keys, np.uint64), np.array(codes, np.int64)))
            self._num_keys += len(keys)


def _rounds(keys: Keys, codes: Places) -> Iterator[tuple[Keys, Places]]:
    """Changes in rounds: a block that several changes are about gets one of them a round."""
    while len(keys):
        _, first = np.unique(keys, return_index=True)
        first.sort()
        yield keys[first], codes[first]
        if len(first) == len(keys):
            break
        rest = np.ones(len(keys), np.bool_)
        rest[first] = False
        keys, codes = keys[rest], codes[rest]
