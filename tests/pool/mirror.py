"""A store as those see it who follow its events."""

from prfaas.core.kv.blocks import BlockKey

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
