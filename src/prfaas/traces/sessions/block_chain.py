"""Blocks of the texts of a session.

Conversion of a recorded session's blocks to the larger blocks of a simulated cache.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, islice
from math import ceil
from pathlib import Path
from typing import Any

from prfaas.errors import ConfigError

BLOCK_TOKENS = 64
"""Tokens of a block of sessions."""
MESSAGE_TOKENS = 4
"""Tokens of the markers of a message: begin, role, line break, end."""


@dataclass(frozen=True, slots=True)
class TextUnits:
    """A measure of texts."""

    title: str
    cut: Callable[[str], bytes]
    """From a text to its units, as bytes of `unit_bytes` each."""
    unit_bytes: int
    units_per_block: int
    """Units of a block of `BLOCK_TOKENS` tokens."""
    units_per_message: int
    """Units of the markers around a message."""

    def num_tokens(self, num_units: int) -> int:
        """Tokens of a number of units, rounded up."""
        return ceil(num_units * BLOCK_TOKENS / self.units_per_block)


def characters(per_token: float) -> TextUnits:
    """Characters with a fixed number per token.

    Args:
        per_token: In [0.25, 64].
    """
    return TextUnits(
        f"{per_token:g} characters a token",
        lambda text: text.encode("utf-32-le"),
        4,
        round(BLOCK_TOKENS * per_token),
        round(MESSAGE_TOKENS * per_token),
    )


def tokens_of(directory: Path) -> TextUnits:
    """Tokens of a model; ConfigError if it cannot be read.

    Args:
        directory: Holds its `tokenizer.json`.
    """
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{path} cannot be read as a tokenizer: {error}") from None

    def cut(text: str) -> bytes:
        return array("I", tokenizer.encode(text, add_special_tokens=False).ids).tobytes()

    name = f"tokens of {directory.name or directory}"
    return TextUnits(name, cut, array("I").itemsize, BLOCK_TOKENS, MESSAGE_TOKENS)


_DIGEST_BYTES = 16


class _Numbers:
    """Numbers in the order in which digests were first seen, and which several sessions have."""

    def __init__(self, num_max: int) -> None:
        self._num_max = num_max
        self._numbers: dict[bytes, int] = {}
        self._owners = array("I")
        self.shared = bytearray()

    def of(self, digest: bytes, session: int) -> int:
        number = self._numbers.setdefault(digest, len(self._numbers))
        if number == len(self._owners):
            if number == self._num_max:
                raise ConfigError(
                    f"more than {self._num_max:,} different blocks; import a part: --requests"
                )
            self._owners.append(session)
            self.shared.append(0)
        elif self._owners[number] != session:
            self.shared[number] = 1
        return number


class BlockNumbers:
    """Numbers of the blocks of a file, and which blocks several sessions have.

    Whole blocks count from 0 and last, partial ones of prompts from `num_max`, so that the blocks
    of a growing prompt are one run.

    Args:
        key: Secret of the hashes. It changes no number: a transcript's author must not be able to
            make two blocks look alike.
        num_max: Limit of different blocks.
    """

    def __init__(self, key: bytes, num_max: int) -> None:
        self.key, self._num_max = key, num_max
        self._whole, self._partial = _Numbers(num_max), _Numbers(num_max)

    def whole(self, digest: bytes, session: int) -> int:
        """The number of a block that a session has; ConfigError if there are too many."""
        return self._whole.of(digest, session)

    def partial(self, digest: bytes, session: int) -> int:
        """The number of a prompt's last block, which is not full; ConfigError if there are too
        many."""
        return self._num_max + self._partial.of(digest, session)

    def shared(self, first: int, count: int) -> list[tuple[int, int]]:
        """Runs of blocks, among `count` from `first`, that several sessions have."""
        base = 0 if first < self._num_max else self._num_max
        marks = (self._partial if base else self._whole).shared
        runs, at, end = [], first - base, first - base + count
        while (start := marks.find(b"\1", at, end)) >= 0:
            stop = marks.find(b"\0", start, end)
            at = end if stop < 0 else stop
            runs.append((base + start, at - start))
        return runs


class BlockChain:
    """A growing prompt.

    Args:
        numbers: Of the file's blocks.
        units: What texts are measured in.
    """

    def __init__(self, numbers: BlockNumbers, session: int, units: TextUnits) -> None:
        self._numbers, self._session, self._units = numbers, session, units
        self._hash = blake2b(key=numbers.key, digest_size=_DIGEST_BYTES)
        self._runs: list[tuple[int, int]] = []
        self._num_units = 0

    def add(self, role: str, text: bytes) -> None:
        """Add a message: its role and its units."""
        units, size = self._units, self._units.unit_bytes
        # Not its length: prompts that part within a message share the blocks before.
        self._hash.update(b"\0" + role.encode())
        whole = bytes(units.units_per_message * size) + text
        at, block_bytes = 0, units.units_per_block * size
        while at < len(whole):
            room = block_bytes - self._num_units * size % block_bytes
            piece = whole[at : at + room]
            self._hash.update(piece)
            self._num_units += len(piece) // size
            at += room
            if len(piece) == room:
                self._append(self._numbers.whole(self._hash.digest(), self._session))

    def _append(self, number: int) -> None:
        if self._runs and sum(self._runs[-1]) == number:
            first, count = self._runs[-1]
            self._runs[-1] = (first, count + 1)
        else:
            self._runs.append((number, 1))

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return self._units.num_tokens(self._num_units)

    def runs(self) -> Runs:
        """First number and length of each run of the blocks so far; the last may be a part."""
        if self._num_units % self._units.units_per_block == 0:
            return tuple(self._runs)
        last = self._numbers.partial(self.digest(), self._session)
        return (*self._runs, (last, 1))

    def digest(self) -> bytes:
        """Hash of all so far."""
        return self._hash.digest()


Runs = tuple[tuple[int, int], ...]
SharedNames = dict[tuple[int, tuple[int, ...]], int]
"""Name of a group of blocks, by the name of the group before it and its ids."""


class Regroup:
    """Names groups of blocks; a name stands for everything from the start of the prompt;
    ConfigError if one size is no multiple of the other.

    Args:
        source_tokens: Tokens of a recorded block.
        block_tokens: Tokens of a block of the cache, a multiple of `source_tokens`.
        names: Where new names come from.
        shared: Runs of recorded ids that other sessions have too, rising.
        shared_names: Names of groups of such ids; grows. The sessions of a file have one.
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
