"""Dtype planes: which parts of a block hold numbers of which type.

A block is the data of all layers of its cache group, one after the other. Attention in bfloat16 is
one plane; a layer of linear state is often two, a convolution in bfloat16 and a state in float32.
Planes are a hint for codecs: a wrong one costs ratio, never a byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

PLANES_MAX = 512
"""Planes of one group. A group with more is announced without."""
DTYPE_CHARS_MAX = 32


class Plane(NamedTuple):
    """Neighbouring numbers of one type.

    Attributes:
        dtype: Name of the type as in PyTorch, such as `bfloat16`.
        num_bytes: Size, at least 1.
    """

    dtype: str
    num_bytes: int


class KvPage(NamedTuple):
    """Keys and values of neighbouring layers that are alike: for each head and token, the key and
    then the value, in bfloat16.

    Attributes:
        is_token_major: True if a token has all heads together, False if a head has all tokens.
    """

    layers: int
    tokens: int
    heads: int
    key_size: int
    value_size: int
    is_token_major: bool

    @property
    def num_bytes(self) -> int:
        """Size of all layers."""
        return 2 * self.layers * self.tokens * self.heads * (self.key_size + self.value_size)


Planes = tuple[Plane, ...]
"""The planes of a block, in order; empty if they are not known."""


def merged(planes: Iterable[Plane]) -> Planes:
    """Join neighbours of one type; return no planes at all if more than PLANES_MAX are left."""
    found: list[Plane] = []
    for dtype, num_bytes in planes:
        if found and found[-1].dtype == dtype:
            found[-1] = Plane(dtype, found[-1].num_bytes + num_bytes)
        elif num_bytes:
            found.append(Plane(dtype, num_bytes))
    return tuple(found) if len(found) <= PLANES_MAX else ()


def part(planes: Planes, offset: int, num_bytes: int) -> Planes:
    """Return the planes of `num_bytes` bytes of a block from `offset` on."""
    found: list[Plane] = []
    end, start = offset + num_bytes, 0
    for dtype, size in planes:
        inside = min(end, start + size) - max(offset, start)
        if inside > 0:
            found.append(Plane(dtype, inside))
        start += size
        if start >= end:
            break
    return tuple(found)
