"""The blocks of a shared tier that a pool node knows of, by name and by pack."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prfaas.core.invariants import require
from prfaas.core.kv.blocks import BlockName
from prfaas.pool.shared.packs import PackedBlock, PackName

BLOCKS_MAX = 1_000_000
"""Blocks in the index: about half a KiB each. Those of older packs are not found."""
ASIDE_MAX = 4096
"""Blocks that are set aside. One beyond them is not read again before a restart."""


class PackIndex:
    """Index of packs. Several packs may hold the same block; the first one known counts."""

    def __init__(self, blocks_max: int = BLOCKS_MAX) -> None:
        self._blocks_max = blocks_max
        self._places: dict[BlockName, PackedBlock] = {}
        self._packs: dict[PackName, list[BlockName]] = {}
        self._sources: dict[PackName, frozenset[str]] = {}
        self._tenant: dict[PackName, str] = {}
        """The tenant of each pack that has blocks of only one."""
        self._aside: dict[BlockName, tuple[PackedBlock, int]] = {}
        """Blocks that could not be read, and until when, ns. Their packs list them all the same."""

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: BlockName) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[BlockName]:
        return iter(self._places)

    def __getitem__(self, name: BlockName) -> PackedBlock:
        return self._places[name]

    def get(self, name: BlockName) -> PackedBlock | None:
        """The place of a block; None if it is unknown."""
        return self._places.get(name)

    @property
    def packs(self) -> frozenset[PackName]:
        """All packs in the index."""
        return frozenset(self._packs)

    @property
    def newest(self) -> PackName | None:
        """The pack that was added last."""
        return next(reversed(self._packs), None)

    def sources_of(self, pack: PackName) -> frozenset[str] | None:
        """Pools that the blocks of a pack came from; None if the pack is not in the index."""
        return self._sources.get(pack)

    def only_of(self, tenant: str) -> list[PackName]:
        """Packs that have blocks of one tenant only."""
        return [pack for pack, tag in self._tenant.items() if tag == tenant]

    def add(
        self,
        pack: PackName,
        blocks: Mapping[BlockName, PackedBlock],
        kept: Mapping[BlockName, PackedBlock] | None = None,
    ) -> list[BlockName]:
        """Add a pack.

        Args:
            kept: Those that no purge refuses; None for all.

        Returns:
            Blocks that were not known.
        """
        if pack in self._packs:
            return []  # It was listed while this node wrote it.
        room = max(0, self._blocks_max - len(self._places))
        kept = blocks if kept is None else kept
        new = [name for name in kept if name not in self._places][:room]
        for name in new:
            self._places[name] = blocks[name]
        self._packs[pack] = new
        self._sources[pack] = all_sources(blocks.values())
        tags = {block.origin.tenant for block in blocks.values()}
        if len(tags) == 1:
            self._tenant[pack] = tags.pop()
        return new

    def remove(self, packs: Iterable[PackName]) -> list[BlockName]:
        """Remove packs.

        Returns:
            Blocks that are not known any more.
        """
        gone: list[BlockName] = []
        for pack in packs:
            self._sources.pop(pack, None)
            self._tenant.pop(pack, None)
            for name in self._packs.pop(pack, ()):
                place = self._places.get(name)
                if place is not None and place.pack.name == pack:
                    del self._places[name]
                    gone.append(name)
        return gone

    def emptied(self, packs: Iterable[PackName]) -> list[PackName]:
        """Those of some packs of which no block is known any more."""
        return [pack for pack in packs if not self._has_any(pack)]

    def _has_any(self, pack: PackName) -> bool:
        places = (self._places.get(name) for name in self._packs.get(pack, ()))
        return any(place is not None and place.pack.name == pack for place in places)

    def drop(self, names: Iterable[BlockName]) -> None:
        """Remove blocks for good; the packs of some of them may stay."""
        for name in names:
            self._places.pop(name, None)
        self._aside.clear()

    def validate(self) -> None:
        """Check that places and packs name the same blocks.

        Raises:
            AssertionError: They do not.
        """
        known = {pack: set(names) for pack, names in self._packs.items()}
        for name, place in self._places.items():
            require(name in known.get(place.pack.name, ()), "a block without its pack")
        require(known.keys() == self._sources.keys() >= self._tenant.keys(), "packs")

    def set_aside(self, name: BlockName, block: PackedBlock, until_ns: int) -> bool:
        """Remove one block, which could not be read, until `put_back` at some time.

        Returns:
            False if its place has changed, and it is kept.
        """
        if self._places.get(name) is not block:
            return False
        del self._places[name]
        self._aside[name] = block, until_ns
        if len(self._aside) > ASIDE_MAX:
            del self._aside[next(iter(self._aside))]
        return True

    def put_back(self, now_ns: int) -> list[BlockName]:
        """Add blocks again that were set aside until now.

        Returns:
            Those that were not known.
        """
        due = [(name, block) for name, (block, until) in self._aside.items() if until <= now_ns]
        found = []
        for name, block in due:
            del self._aside[name]
            if block.pack.name in self._packs and name not in self._places:
                self._places[name] = block
                found.append(name)
        return found


def all_sources(blocks: Iterable[PackedBlock]) -> frozenset[str]:
    """Pools that some blocks came from, together."""
    kinds = {block.origin.sources for block in blocks}
    return frozenset().union(*kinds)
