"""Conversion of a recorded session's blocks to the larger blocks of a simulated cache."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import chain, islice

from prfaas.errors import ConfigError

Runs = tuple[tuple[int, int], ...]
SharedNames = dict[tuple[int, tuple[int, ...]], int]
"""Name of a group of blocks, by the name of the group before it and its ids."""


class Regroup:
    """Names groups of blocks; a name stands for everything from the start of the prompt.

    Args:
        source_tokens: Tokens of a recorded block.
        block_tokens: Tokens of a block of the cache, a multiple of `source_tokens`.
        names: Where new names come from.
        shared: Runs of recorded ids that other sessions have too, rising.
        shared_names: Names of groups of such ids; grows. The sessions of a file have one.

    Raises:
        ConfigError: One size is no multiple of the other.
    """

    def __init__(
        self,
        source_tokens: int,
        block_tokens: int,
        names: Iterator[int],
        shared: Runs = (),
        shared_names: SharedNames | None = None,
    ) -> None:
        if block_tokens % source_tokens:
            raise ConfigError(
                f"cache.block_tokens is {block_tokens}; blocks of the sessions have "
                f"{source_tokens} tokens, so it has to be a multiple of that"
            )
        self._ratio, self._names = block_tokens // source_tokens, names
        self._shared = shared
        self._shared_starts = [first for first, _ in shared]
        self._shared_names: SharedNames = {} if shared_names is None else shared_names
        self._known: SharedNames = {}
        self._named: dict[Runs, tuple[int, ...]] = {}

    def blocks(self, runs: Runs, before: Runs | None) -> tuple[int, ...]:
        """Names of a prompt's groups; the last one may be a partial group.

        Args:
            runs: First id and length of each run of recorded blocks.
            before: Runs of an earlier prompt that starts alike; its names are taken over.
        """
        kept = 0 if before is None else common_length(runs, before) // self._ratio
        found = list(self._named[before][:kept]) if before is not None else []
        ids = _ids(runs, kept * self._ratio)
        while group := tuple(islice(ids, self._ratio)):
            key = (found[-1] if found else -1, group)
            # An id names all before it too: a group whose last block is shared is shared.
            known = self._shared_names if self._is_shared(group[-1]) else self._known
            name = known.get(key)
            if name is None:
                name = known[key] = next(self._names)
            found.append(name)
        self._named[runs] = tuple(found)
        return self._named[runs]

    def _is_shared(self, block: int) -> bool:
        i = bisect_right(self._shared_starts, block) - 1
        return i >= 0 and block < sum(self._shared[i])


def common_length(a: Runs, b: Runs) -> int:
    """Number of leading ids that two sequences share."""
    shared = 0
    for (first_a, length_a), (first_b, length_b) in zip(a, b, strict=False):
        if first_a != first_b:
            break
        shared += min(length_a, length_b)
        if length_a != length_b:
            break
    return shared


def _ids(runs: Runs, skip: int) -> Iterator[int]:
    return islice(chain.from_iterable(range(first, first + n) for first, n in runs), skip, None)
