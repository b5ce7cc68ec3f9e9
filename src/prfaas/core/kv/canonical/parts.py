"""The canonical block of a cache group: layers, their parts, and the order of the bytes.

A canonical block is the data of all layers of the group, one layer after the other in the order of
the model. A layer is its parts, one after the other: attention has `kv`, a latent `latent`, linear
state `conv` and `state`. A part repeats a row `outer` times, and a row is its sections, one after
the other. A section is `units` pieces of equal size that ranks divide among themselves: heads of
attention, heads of a recurrent state, channels of a convolution.

| layer | part | outer | sections (units x bytes of a unit) |
|---|---|---|---|
| attention, head-major cache (`LBHNC`) | kv | 1 | kv: KV heads x (tokens x K and V of a head) |
| attention, token-major cache (`LBNHC`) | kv | tokens | kv: KV heads x (K and V of a head) |
| MLA | latent | 1 | latent: 1 x (tokens x latent); of an indexer in kernel blocks of one length |
| gated delta net, KDA | conv | kept steps | q, k, v: heads x (head size x item) |
| gated delta net, KDA | state | 1 | state: heads x state of a head |
| Mamba-2 | conv | kept steps | x: heads, B and C: groups |
| short convolution | conv | kept steps | x: channels |

Every rank has all sections of a row, each with its own units (`shards.py`). Padding of pages and
copies of replicated heads are in rows of host memory only, never in a canonical block.

A block may have more tokens than a page of the engine. It then has the bytes that a page of so many
tokens would have, and each page of the engine holds a run of its tokens: some rows of a part that
has a row for each token, or a piece of each strip of a unit. States are those at the end of the
block, in its last page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prfaas.core.kv.blocks import Plane, Planes, merged


class Strip(NamedTuple):
    """Neighbouring runs of bytes, each of which has all tokens of a block in their order.

    K and V of a head side by side are one strip. Keys that are stored dimension by dimension are a
    strip for each dimension."""

    number: int
    """Number of runs, at least 1."""
    num_bytes: int


class Section(NamedTuple):
    """Neighbouring units that ranks divide among themselves."""

    name: str
    """Such as `kv` or `q`."""
    units: int
    """Number in the whole model, at least 1; 1 is never divided."""
    unit_bytes: int
    """Size of each in one row of its part."""
    strips: tuple[Strip, ...] = ()
    """A unit as runs over tokens; empty if pages cannot share a unit."""

    @property
    def num_bytes(self) -> int:
        """Size in one row of the part."""
        return self.units * self.unit_bytes


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Numbers of one type of a layer."""

    name: str
    """Such as `kv`, `latent`, `conv` or `state`."""
    dtype: str
    """Name of the type as in PyTorch, such as `bfloat16`."""
    outer: int
    """Number of rows, each with all sections."""
    sections: tuple[Section, ...]
    """The sections of a row, in order."""
    by_token: bool = False
    """True if each row is a token."""

    def __post_init__(self) -> None:
        """Reject sizes below 1, and strips that are not a unit."""
        sizes = [self.outer, *(n for s in self.sections for n in (s.units, s.unit_bytes))]
        if min(sizes) < 1 or not self.sections:
            raise ValueError(f"part {self.name}: sizes {sizes}; the least is 1")
        for section in self.sections:
            length = sum(number * size for number, size in section.strips)
            if section.strips and length != section.unit_bytes:
                raise ValueError(
                    f"part {self.name}: strips of {length} bytes, units of {section.unit_bytes}"
                )

    @property
    def num_bytes(self) -> int:
        """Size in a canonical block."""
        return self.outer * sum(section.num_bytes for section in self.sections)

    def is_shared_by(self, num_pages: int) -> bool:
        """Return True if so many pages can hold equal runs of its tokens."""
        if self.by_token or num_pages == 1:
            return self.outer % num_pages == 0 or num_pages == 1
        return self.outer == 1 and all(
            section.strips and all(size % num_pages == 0 for _, size in section.strips)
            for section in self.sections
        )

    @property
    def words(self) -> str:
        """Everything that determines the order of the bytes, such as `kv bfloat16 16(kv 2x512)`."""
        sizes = [f"{s.name} {s.units}x{s.unit_bytes}" for s in self.sections]
        return f"{self.name} {self.dtype} {self.outer}({', '.join(sizes)})"


LayerParts = tuple[LayerPart, ...]
"""The parts of a layer, in order."""


def layer_bytes(layer: LayerParts) -> int:
    """Return the size of a layer in a canonical block."""
    return sum(part.num_bytes for part in layer)


def block_bytes(layers: Sequence[LayerParts]) -> int:
    """Return the size of a canonical block: the unique bytes of its layers."""
    return sum(layer_bytes(layer) for layer in layers)


def block_planes(layers: Sequence[LayerParts]) -> Planes:
    """Return the dtype planes of a canonical block."""
    return merged(Plane(part.dtype, part.num_bytes) for layer in layers for part in layer)
