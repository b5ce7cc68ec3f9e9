"""The block store against a model: a list of names in the order of their last use."""

import asyncio
from collections.abc import Callable, Collection, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prfaas.core.cache.eviction import LeastRecentlyUsed
from prfaas.core.cache.keep_rules import Origin, Scope
from prfaas.core.cache.tenant_shares import TenantShares
from prfaas.core.kv.blocks import BlockKey, BlockName
from prfaas.pool.store.block_store import BlockStore
from prfaas.pool.store.origins import LOCAL
from prfaas.pool.store.tier_ports import ReadBudget, StoredBlock
from tests.pool.mirror import Mirror, Name

CAPACITY = 100
LAYOUTS = st.sampled_from([b"a" * 32, b"b" * 32])
KEYS = st.builds(BlockKey, st.integers(0, 1), st.sampled_from([b"x" * 32, b"y" * 32, b"z" * 32]))


class StoreAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.mirror = Mirror()
        self.store = BlockStore(CAPACITY, self.mirror)
        self.sizes: dict[Name, int] = {}
        """Sizes by name, the least recently used first."""
        self.pins: dict[Name, int] = {}

    def use(self, name: Name) -> None:
        if name in self.sizes:
            self.sizes[name] = self.sizes.pop(name)

    def room_for(self, size: int) -> list[Name] | None:
        """Blocks to evict for a block of that size; None if too few may go."""
        victims: list[Name] = []
        free = CAPACITY - sum(self.sizes.values())
        for name, held in self.sizes.items():
            if free >= size:
                break
            if not self.pins.get(name):
                victims.append(name)
                free += held
        return victims if free >= size else None

    @rule(layout_id=LAYOUTS, key=KEYS, size=st.integers(1, CAPACITY + 10))
    def put(self, layout_id: bytes, key: BlockKey, size: int) -> None:
        name = (layout_id, key)
        kept = self.store.put(layout_id, key, bytearray(size), b"d" * 32)
        if name in self.sizes:
            assert kept
            self.use(name)
            return
        victims = self.room_for(size)
        assert kept == (victims is not None)
        if victims is not None:
            for victim in victims:
                del self.sizes[victim]
            self.sizes[name] = size

    @rule(layout_id=LAYOUTS, key=KEYS)
    def get(self, layout_id: bytes, key: BlockKey) -> None:
        block = self.store.get(layout_id, key)
        name = (layout_id, key)
        assert (block is not None) == (name in self.sizes) == (name in self.store)
        assert block is None or len(block.data) == self.sizes[name]
        self.use(name)

    @rule(layout_id=LAYOUTS, keys=st.lists(KEYS, max_size=4))
    def touch(self, layout_id: bytes, keys: list[BlockKey]) -> None:
        self.store.touch(layout_id, keys)
        for key in keys:
            self.use((layout_id, key))

    @rule(layout_id=LAYOUTS, key=KEYS)
    def pin(self, layout_id: bytes, key: BlockKey) -> None:
        block = self.store.get(layout_id, key)
        if block is not None:
            block.pins += 1
            name = (layout_id, key)
            self.pins[name] = self.pins.get(name, 0) + 1
            self.use(name)

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name, pins in self.pins.items() if pins]))
        block = self.store.get(*name)
        assert block is not None, "a pinned block was evicted"
        block.pins -= 1
        self.pins[name] -= 1
        self.use(name)

    @invariant()
    def content_is_the_models(self) -> None:
        assert list(self.store.names()) == list(self.sizes)
        assert len(self.store) == len(self.sizes)
        assert self.mirror.held == set(self.sizes)
        assert self.store.room.used_bytes == sum(self.sizes.values()) <= CAPACITY
        self.store.validate()


TestStoreAgainstModel = StoreAgainstModel.TestCase
TestStoreAgainstModel.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_a_block_that_does_not_fit_evicts_nobody() -> None:
    store = BlockStore(10, Mirror())
    key, other = BlockKey(0, b"x" * 32), BlockKey(0, b"y" * 32)
    assert store.put(b"a" * 32, key, bytearray(10), b"d" * 32)
    assert not store.put(b"a" * 32, other, bytearray(11), b"d" * 32)
    block = store.get(b"a" * 32, key)
    assert block is not None
    block.pins = 1
    assert not store.put(b"a" * 32, other, bytearray(1), b"d" * 32)
    assert list(store.names()) == [(b"a" * 32, key)]


class SlowDisk:
    """Takes one block at a time, and finishes it when it is told to."""

    label = "disk"
    is_written_in_advance, needs_probe = True, False

    def __init__(self) -> None:
        self.num_missed = 0
        self.written: set[BlockName] = set()
        self._current: list[tuple[BlockName, Callable[[], None]]] = []

    def __contains__(self, name: BlockName) -> bool:
        return name in self.written

    def names(self) -> Iterator[BlockName]:
        return iter(self.written)

    def num_bytes(self, name: BlockName) -> int:
        return 10

    def origin(self, name: BlockName) -> Origin:
        return LOCAL

    def offer(self, name: BlockName, block: StoredBlock, done: Callable[[], None]) -> bool:
        assert name not in self.written
        if not self._current:
            self._current.append((name, done))
            return True
        return False

    async def read(self, name: BlockName, into: memoryview, budget: ReadBudget) -> bytes | None:
        into[:] = bytes(10)
        return b"d" * 32

    async def expire(self, names: Collection[BlockName]) -> int:
        return 0

    async def count(self, scope: Scope) -> tuple[set[BlockName], int]:
        return set(), 0

    async def drop(self, scope: Scope) -> None:
        pass

    async def probe(self, names: Collection[BlockName]) -> set[BlockName]:
        return {name for name in names if name in self.written}

    def missed(self) -> None:
        self.num_missed += 1

    async def run(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def validate(self) -> None:
        pass

    def finish(self) -> None:
        name, done = self._current.pop()
        self.written.add(name)
        done()


@given(steps=st.lists(st.one_of(st.integers(0, 30), st.none()), max_size=80))
def test_a_disk_that_is_too_slow_costs_blocks_and_no_memory(steps: list[int | None]) -> None:
    """A number stores that block, None lets the disk finish one."""
    mirror, disk = Mirror(), SlowDisk()
    store = BlockStore(80, mirror)
    store.tiers.add(disk)
    num_stored = 0
    for step in steps:
        if step is not None:
            name = b"a" * 32, BlockKey(0, bytes([step]) * 32)
            num_stored += name not in store
            assert store.put(*name, bytes(10), b"d" * 32)
        elif store.room.is_writing:
            disk.finish()
        assert store.room.used_bytes <= store.room.arena.used_bytes <= 80
        assert mirror.held == set(store.names()) == {name for name in mirror.held if name in store}
        assert num_stored - disk.num_missed == len(mirror.held)
        store.validate()
    while store.room.is_writing:
        disk.finish()
    pins = [block.pins for name in list(store.names()) if (block := store.get(*name))]
    assert not any(pins)
    in_memory = [name for name in store.names() if name in store.in_memory()]
    clean = 80 - store.room.used_bytes + 10 * sum(name in disk for name in in_memory)
    assert clean >= 20, "what is evicted next is on disk once that has caught up"


async def test_a_block_is_promoted_once_others_are_written() -> None:
    disk = SlowDisk()
    store = BlockStore(40, Mirror())
    store.tiers.add(disk)
    names = [(b"a" * 32, BlockKey(0, bytes([n]) * 32)) for n in range(6)]
    for name in names[:5]:
        store.put(*name, bytes(10), b"d" * 32)
        while store.room.is_writing:
            disk.finish()
    first = next(name for name in names if name not in store.in_memory())
    store.put(*names[5], bytes(10), b"d" * 32)
    fetching = asyncio.create_task(store.fetch(*first))
    while not fetching.done():
        if store.room.is_writing:
            disk.finish()
        await asyncio.sleep(0)
    assert fetching.result() is not None
    assert set(store.names()) == set(names)


def test_another_policy_decides_who_goes() -> None:
    class NewestFirst(LeastRecentlyUsed[BlockName]):
        def order(self) -> Iterator[BlockName]:
            return iter(list(super().order())[::-1])

    store = BlockStore(30, Mirror(), TenantShares(NewestFirst(), 30))
    names = [(b"a" * 32, BlockKey(0, bytes([n]) * 32)) for n in range(5)]
    for name in names:
        store.put(*name, bytes(10), b"d" * 32)
    assert set(store.names()) == {names[0], names[1], names[4]}


def leased(capacity: int, sizes: list[int]) -> tuple[BlockStore, list[BlockName]]:
    """A store whose blocks somebody will come for."""
    store = BlockStore(capacity, Mirror())
    names = [(b"a" * 32, BlockKey(0, bytes([number]) * 32)) for number in range(len(sizes))]
    for name, size in zip(names, sizes, strict=True):
        assert store.put(*name, bytearray(size), b"d" * 32, lease_until_ns=10**18)
    return store, names


def test_what_an_engine_caches_evicts_no_block_that_another_waits_for() -> None:
    store, names = leased(100, [40, 40])
    assert store.room.allocate(30, spare_leased=True) is None
    assert all(name in store for name in names)
    assert store.room.allocate(20, spare_leased=True) is not None
    store.release(names[0])
    assert store.room.allocate(30, spare_leased=True) is not None
    assert names[0] not in store
    assert names[1] in store


def test_a_block_that_came_is_there_until_it_was_waited_for() -> None:
    """Room for the next is not made of those that just came."""
    store, names = leased(100, [40, 40])
    buffers = [store.room.receive_buffer(30), store.room.receive_buffer(30)]
    assert all(buffer is not None for buffer in buffers)
    newest = b"a" * 32, BlockKey(0, b"n" * 32)
    assert store.put(*newest, bytearray(10), b"d" * 32, lease_until_ns=10**18)
    assert all(name in store for name in (*names, newest))
    store.room.keep_room()
    assert all(name in store for name in (*names, newest))


def test_copies_that_an_engine_reads_cost_no_block_of_this_host() -> None:
    """An eighth is to be free, and copies take it: they go once they are read."""
    mib = 1 << 20
    store, size = BlockStore(64 * mib, Mirror()), mib - 64
    own = [(b"a" * 32, BlockKey(0, bytes([number]) * 32)) for number in range(50)]
    copies = [(b"a" * 32, BlockKey(0, bytes([100 + number]) * 32)) for number in range(10)]
    for name in own:
        assert store.put(*name, bytearray(size), b"d" * 32)
    for name in copies:
        assert store.put(*name, bytearray(size), b"d" * 32, lease_until_ns=10**18, is_copy=True)
    # Four are in the memory of the store, and the last one is outside.
    buffers = [store.room.receive_buffer(size) for _ in range(5)]
    assert all(buffer is not None for buffer in buffers)
    for name in copies:
        _pin(store, name, 1)
    store.room.keep_room()
    assert all(name in store for name in own)
    for name in copies:
        _pin(store, name, -1)
    store.room.keep_room()
    assert all(name in store for name in own)
    assert not all(name in store for name in copies)


MIB = 1 << 20
SIZE = MIB - 64
"""Of a block: with its pages, a MiB of memory."""


def name_of(number: int) -> BlockName:
    return b"a" * 32, BlockKey(0, number.to_bytes(32, "big"))


def full_of_own_and_copies(num_own: int, num_copies: int) -> tuple[BlockStore, list[BlockName]]:
    """A store of 64 MiB with blocks of this host and leased copies, and all their names."""
    store = BlockStore(64 * MIB, Mirror())
    for number in range(num_own):
        assert store.put(*name_of(number), bytearray(SIZE), b"d" * 32)
    copied(store, range(num_own, num_own + num_copies))
    return store, [name_of(number) for number in range(num_own + num_copies)]


def copied(store: BlockStore, numbers: range, *, is_kept: bool = True) -> None:
    """Receive and put leased copies, all at once."""
    buffers = {number: store.room.receive_buffer(SIZE) for number in numbers}
    for number, data in buffers.items():
        assert data is not None
        data[:1] = bytes([number])
        kept = store.put(*name_of(number), data, b"d" * 32, lease_until_ns=10**18, is_copy=True)
        assert kept == is_kept


def test_a_copy_evicts_copies_and_no_block_of_this_host() -> None:
    """It is received outside the memory; the copies before it are read, or waited for, or idle."""
    for state in ("pinned", "leased", "idle"):
        store, names = full_of_own_and_copies(50, 14)
        for name in names[50:]:
            if state != "leased":
                _pin(store, name, 1)  # Ends the lease.
            if state == "idle":
                _pin(store, name, -1)
        copied(store, range(100, 110))
        assert all(name in store for name in names[:50])
        assert all(name_of(number) in store for number in range(100, 110))
        assert (sum(name in store for name in names[50:]) < 14) == (state == "idle")
        assert (store.room.outside_bytes > 0) == (state != "idle")
        assert store.room.loose_bytes == 0
        assert store.room.arena.used_bytes <= 64 * MIB
        block = store.get(*name_of(105))
        assert block is not None
        assert block.data[0] == 105


def test_copies_outside_the_memory_leave_it_once_they_are_read() -> None:
    store, names = full_of_own_and_copies(50, 14)
    copied(store, range(100, 110))
    assert store.room.outside_bytes == 10 * SIZE
    store.expire(1)
    assert store.room.outside_bytes == 10 * SIZE  # Leases last.
    for number in range(100, 110):
        _pin(store, name_of(number), 1)
    store.expire(2)
    assert store.room.outside_bytes == 10 * SIZE  # They are read.
    for number in range(100, 110):
        _pin(store, name_of(number), -1)
    store.expire(3)
    assert (store.room.outside_bytes, store.room.loose_bytes) == (0, 0)
    assert not any(name_of(number) in store for number in range(100, 110))
    assert all(name in store for name in names)
    assert store.room.receive_buffer(SIZE) is not None


def test_copies_outside_the_memory_have_a_limit() -> None:
    """A pull that is larger goes on: were it refused, an engine would compute its blocks and evict
    as many."""
    store, names = full_of_own_and_copies(50, 14)
    for first in range(100, 124, 8):
        copied(store, range(first, first + 8))
    assert store.room.outside_bytes <= 16 * MIB
    assert all(name_of(number) in store for number in range(100, 124))
    assert sum(name not in store for name in names) == 24 - store.room.outside_bytes // SIZE


def test_copies_that_no_request_waits_for_leave_the_memory_outside() -> None:
    """The request has left while its transfer goes on: they are put without a lease."""
    store, names = full_of_own_and_copies(50, 14)
    buffers = [store.room.receive_buffer(SIZE) for _ in range(4)]
    for number, data in enumerate(buffers, 100):
        assert isinstance(data, bytearray)
        assert store.put(*name_of(number), data, b"d" * 32, is_copy=True)
    buffers.clear()
    del data
    store.expire(1)
    assert (store.room.outside_bytes, store.room.loose_bytes) == (0, 0)
    assert all(name in store for name in names)


def test_room_is_made_from_idle_copies_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each eviction looks at the copy that it evicts, however many there are."""
    store, names = full_of_own_and_copies(10, 54)
    for name in names[10:]:
        _pin(store, name, 1)
        _pin(store, name, -1)
    assert isinstance(store.room.receive_buffer(SIZE), bytearray)
    looked: list[BlockName] = []
    look = store.room._arena_bytes

    def looks(name: BlockName) -> int:
        looked.append(name)
        return look(name)

    monkeypatch.setattr(store.room, "_arena_bytes", looks)
    store.room.keep_room()

    num_evicted = sum(name not in store for name in names)
    assert num_evicted == 8
    assert len(looked) == num_evicted


def test_memory_that_copies_are_received_into_costs_no_block_of_this_host() -> None:
    """On a busy machine blocks arrive faster than they are put."""
    store, names = full_of_own_and_copies(50, 0)
    buffers = [store.room.receive_buffer(SIZE) for _ in range(15)]
    assert isinstance(buffers[-1], bytearray), "outside, so that room is made from now on"
    for number, data in enumerate(buffers, 100):
        assert data is not None
        assert store.put(*name_of(number), data, b"d" * 32, lease_until_ns=10**18, is_copy=True)
        assert all(name in store for name in names)


def test_a_block_that_a_link_waits_for_gets_memory_however_much_is_being_received() -> None:
    """Blocks wait for fragments that come behind those of another block."""
    store, names = full_of_own_and_copies(40, 0)
    received = []
    while (buffer := store.room.receive_buffer(SIZE)) is not None:
        received.append(buffer)
    store.room.keep_room()
    assert store.room.receive_buffer(SIZE) is None
    assert all(name in store for name in names)
    store.room.keep_room(is_waited=True)
    assert store.room.receive_buffer(SIZE) is not None
    assert sum(name not in store for name in names) == 1


def test_blocks_of_this_host_are_received_as_before() -> None:
    """A block that is no copy evicts the least recently used one."""
    store, names = full_of_own_and_copies(64, 0)
    data = store.room.receive_buffer(SIZE)
    assert data is not None
    assert store.put(*name_of(200), data, b"d" * 32)
    assert store.room.outside_bytes == 0
    assert names[0] not in store


def _pin(store: BlockStore, name: tuple[bytes, BlockKey], by: int) -> None:
    block = store.get(*name)
    assert block is not None
    block.pins += by
