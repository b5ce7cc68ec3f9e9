"""Generated contents in place of computed ones: bytes of blocks, and tokens of answers.

Both are drawn from what they would be computed from, so what is wrong shows. A sequence carries a
*stain*: empty while every block it used had the right bytes, else a digest of the wrong ones. The
stain goes into all that follows from it, its blocks and its answer, as it would in a model.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

import blake3

from prfaas.core.kv.blocks import BlockKey

CLEAN = b""
"""The stain of a sequence with only correct blocks."""


def block_bytes(key: BlockKey, num_bytes: int, stain: bytes = CLEAN) -> bytes:
    """The bytes of a block, derived from its name and from the stain of its sequence."""
    name = struct.pack("<I", key.group) + key.block_hash + stain
    return blake3.blake3(name).digest(length=num_bytes)


def stained(stain: bytes, wrong: bytes) -> bytes:
    """The stain of a sequence that used something wrong."""
    return blake3.blake3(stain + blake3.blake3(wrong).digest()).digest()


class DrawnAnswer:
    """Draws the tokens of one choice; each follows from all tokens before it.

    So an answer that is continued on another engine, from the prompt and what has been sent,
    continues as it would have.

    Args:
        choice: Number of the choice among different ones; 0 for the first.
    """

    def __init__(self, prompt: Sequence[int], stain: bytes = CLEAN, choice: int = 0) -> None:
        self._state = blake3.blake3(stain + struct.pack("<I", choice) if stain or choice else b"")
        self._state.update(array("Q", prompt).tobytes())

    def next(self, vocabulary: Sequence[int]) -> int:
        """The next token, one of `vocabulary`."""
        number = int.from_bytes(self._state.digest(length=8), "little")
        token = vocabulary[number % len(vocabulary)]
        self._state.update(struct.pack("<Q", token))
        return token
