"""Index of a disk tier: the blocks in its segments, by name and by segment, and their sizes.

It does no I/O. The tier changes it on its event loop, once a write, a scan or a removal is over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from prfaas.core.cache.keep_rules import Matches, Origin
from prfaas.core.cache.tenant_shares import Held, Share, TenantShares
from prfaas.core.kv.blocks import BlockName
from prfaas.pool.store.disk_records import DiskPlace

Record = tuple[BlockName, DiskPlace]


class DiskIndex:
    """Blocks and segments of a disk tier. Others read its attributes, and change them by calls.

    Args:
        policy: Order in which segments go; told of every change of one.
    """

    def __init__(self, policy: TenantShares[int]) -> None:
        self._policy = policy
        self.places: dict[BlockName, DiskPlace] = {}
        self.segments: dict[int, list[BlockName]] = {}
        """Names of the records of each segment; not all of them are still in `places`."""
        self.sizes: dict[int, int] = {}
        self.tenants: dict[int, str] = {}
        """Tag of the tenant of each segment; empty if blocks of several may be in it."""
        self.used_bytes = 0
        """All segments together."""
        self._kinds: dict[int, set[tuple[frozenset[str], str]]] = {}
        """Sources and tenants of the records of each segment: a purge inspects those that may
        match."""
        self._unlisted: list[Record] = []
        """Records on disk that the index lacks and that the next start would find: they could not
        be read or marked, or there is another one of that name."""

    def share(self, shares: Mapping[str, Share]) -> None:
        """Set the tenants' shares from now on, by their tags."""
        sizes = self.sizes.items()
        self._policy.assign(shares, (Held(each, self.tenants[each], size) for each, size in sizes))

    # --- segments ---

    def add(self, number: int, num_bytes: int, tenant: str) -> None:
        """Add a segment without blocks."""
        self.segments[number] = []
        self._kinds[number] = set()
        self.sizes[number] = num_bytes
        self.used_bytes += num_bytes
        self.tenants[number] = tenant
        self._policy.added(number, tenant, num_bytes)

    def grow(self, number: int, num_bytes: int) -> None:
        """Change the size of a segment; a negative number of bytes shrinks it."""
        self._policy.grown(number, self.tenants[number], num_bytes)
        self.sizes[number] += num_bytes
        self.used_bytes += num_bytes

    def append(self, number: int, records: Iterable[Record]) -> None:
        """Add records that were written to a segment, the size of which counts them already."""
        names, kinds = self.segments[number], self._kinds[number]
        for name, place in records:
            self.places[name] = place
            names.append(name)
            kinds.add(_kind(place.origin))

    def take_in(self, number: int, num_bytes: int, records: Sequence[Record]) -> list[BlockName]:
        """Add a segment that was found on disk, and return those of its blocks that are new."""
        tags = {place.origin.tenant for _, place in records}
        self.add(number, num_bytes, tags.pop() if len(tags) == 1 else "")
        new: list[BlockName] = []
        for name, place in records:
            earlier = self.places.get(name)
            if earlier is None:
                new.append(name)
            else:
                self._unlisted.append((name, earlier))
            self.places[name] = place  # A segment may have two records of a name.
        self.segments[number] = [name for name, _ in records]
        self._kinds[number] = {_kind(place.origin) for _, place in records}
        return new

    def remove(self, number: int) -> list[BlockName]:
        """Remove a segment that is no longer on disk, and return the blocks that are gone."""
        size, tenant = self.sizes.pop(number), self.tenants.pop(number)
        self.used_bytes -= size
        self._policy.removed(number, tenant, size)
        self._unlisted = [record for record in self._unlisted if record[1].segment != number]
        del self._kinds[number]
        gone: list[BlockName] = []
        for name in self.segments.pop(number):
            place = self.places.get(name)
            if place is not None and place.segment == number:
                del self.places[name]
                gone.append(name)
        return gone

    def is_live(self, number: int) -> bool:
        """Return True if a segment has a block; the last one, most often."""
        places = (self.places.get(name) for name in reversed(self.segments[number]))
        return any(place is not None and place.segment == number for place in places)

    # --- blocks ---

    def may_match(self, number: int, matches: Matches) -> bool:
        """Return True if a segment may have blocks with a matching origin."""
        kinds = self._kinds.get(number, ())
        return any(matches(Origin(sources, tenant=tag)) for sources, tag in kinds)

    def matching(
        self, number: int, names: Sequence[BlockName], matches: Matches
    ) -> dict[BlockName, DiskPlace]:
        """Those of some blocks that are in a segment and have a matching origin."""
        places = {name: place for name in names if (place := self.places.get(name)) is not None}
        return {
            name: place
            for name, place in places.items()
            if place.segment == number and matches(place.origin)
        }

    def forget(self, records: Mapping[BlockName, DiskPlace]) -> None:
        """Miss blocks from now on; their records stay on disk."""
        for name in records:
            del self.places[name]
        self._unlisted += records.items()

    def forgotten(self, matches: Matches) -> list[Record]:
        """Records on disk that the next start would find, with a matching origin."""
        return [record for record in self._unlisted if matches(record[1].origin)]

    def erased(self, records: Collection[Record]) -> None:
        """Forgotten records were marked on disk: the next start will not find them."""
        marked = set(records)
        self._unlisted = [record for record in self._unlisted if record not in marked]


def _kind(origin: Origin) -> tuple[frozenset[str], str]:
    return origin.sources, origin.tenant
