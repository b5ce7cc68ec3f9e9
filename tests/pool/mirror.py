"""A store as those see it who follow its events."""

from collections.abc import Iterable

from prfaas.core.cache.keep_rules import KeepRules
from prfaas.core.kv.blocks import BlockKey, BlockName
from prfaas.pool.store.tier_ports import LowerTier

Name = tuple[bytes, BlockKey]


class Mirror:
    """An observer that follows the events, as a gateway would."""

    def __init__(self) -> None:
        self.held: set[Name] = set()

    def stored(self, layout_id: bytes, keys: list[BlockKey]) -> None:
        for key in keys:
            assert (layout_id, key) not in self.held, "stored twice without having gone"
            self.held.add((layout_id, key))

    def evicted(self, layout_id: bytes, keys: list[BlockKey]) -> None:
        for key in keys:
            self.held.remove((layout_id, key))


class Owner:
    """A store above a tier, which notes what is gone there."""

    def __init__(self, gone: list[BlockName] | None = None) -> None:
        self.gone = [] if gone is None else gone
        self.rules = KeepRules()

    def found_below(self, tier: LowerTier, names: Iterable[BlockName]) -> None:
        pass

    def gone_below(self, names: Iterable[BlockName]) -> None:
        self.gone += names
