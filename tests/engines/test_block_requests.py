"""Jobs and lookups of an engine: each is reported once, whatever becomes of the pool node."""

import sys
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prfaas.engines.block_requests import (
    ANSWER_MAX_NS,
    ASK_AGAIN_MAX_NS,
    ASK_AGAIN_NS,
    BlockRequests,
    BlockState,
    Lookups,
)
from prfaas.wire.messages.base import Message
from prfaas.wire.messages.engine import (
    HIT,
    MISS,
    ON_ITS_WAY,
    Load,
    LoadDone,
    Lookup,
    LookupDone,
    Store,
    StoreDone,
    TransferOver,
)
from prfaas.wire.messages.fields import Key

KEYS: list[Key] = [(0, bytes([n]) * 32) for n in range(4)]
REQUESTS = ["one", "two"]
WAIT_NS = 1_000_000_000
TRANSFER = b"t" * 16


class Pool:
    """The far end: takes messages while it is there, and answers when told to."""

    def __init__(self) -> None:
        self.is_there = True
        self.inbox: list[Message] = []
        self.now = 0
        self.requests = BlockRequests(self.take, lambda: self.now)

    def take(self, message: Message) -> bool:
        if self.is_there:
            self.inbox.append(message)
        return self.is_there

    def lose(self) -> None:
        self.is_there = False
        self.inbox.clear()
        self.requests.on_lost()

    def lookups(self) -> list[Lookup]:
        return [message for message in self.inbox if isinstance(message, Lookup)]

    def answer(self, found: int) -> None:
        """Answer every lookup."""
        for lookup in self.lookups():
            self.inbox.remove(lookup)
            answers = bytes([found]) * len(lookup.keys)
            self.requests.on_message(LookupDone(job=lookup.job, found=answers))


class JobsAndLookups(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool()
        self.next_job = 0
        self.open: set[int] = set()
        self.reported: list[int] = []

    @rule(num_keys=st.integers(1, 4), is_load=st.booleans())
    def submit(self, num_keys: int, is_load: bool) -> None:
        job, self.next_job = self.next_job, self.next_job + 1
        keys, rows = KEYS[:num_keys], list(range(num_keys))
        self.open.add(job)
        self.pool.requests.submit(
            Load(job=job, keys=keys, rows=rows) if is_load else Store(job=job, keys=keys, rows=rows)
        )

    @precondition(lambda self: self.pool.inbox)
    @rule(data=st.data(), good=st.booleans(), twice=st.booleans())
    def answer_one(self, data: st.DataObject, good: bool, twice: bool) -> None:
        message = data.draw(st.sampled_from(self.pool.inbox))
        self.pool.inbox.remove(message)
        answer: StoreDone | LoadDone | LookupDone
        match message:
            case Store():
                answer = StoreDone(job=message.job, stored=good)
            case Load():
                answer = LoadDone(job=message.job, loaded=bytes([good]) * len(message.keys))
            case Lookup():
                found = data.draw(st.sampled_from([HIT, MISS, ON_ITS_WAY]))
                answer = LookupDone(job=message.job, found=bytes([found]) * len(message.keys))
            case _:
                raise AssertionError(message)
        for _ in range(1 + twice):
            self.pool.requests.on_message(answer)

    @rule()
    def lose(self) -> None:
        self.pool.lose()

    @rule()
    def come_back(self) -> None:
        self.pool.is_there = True

    @rule(request=st.sampled_from(REQUESTS), with_transfer=st.booleans())
    def begin(self, request: str, with_transfer: bool) -> None:
        self.pool.requests.begin(request, b"t" * 16 if with_transfer else None, "source", WAIT_NS)

    @rule(request=st.sampled_from(REQUESTS))
    def end(self, request: str) -> None:
        self.pool.requests.end(request)

    @rule(request=st.sampled_from(REQUESTS), key=st.sampled_from(KEYS))
    def look_up(self, request: str, key: Key) -> None:
        self.pool.requests.look_up(request, key)

    @rule(request=st.sampled_from(REQUESTS), keys=st.lists(st.sampled_from(KEYS)))
    def forget(self, request: str, keys: list[Key]) -> None:
        self.pool.requests.forget(request, keys)

    @rule()
    def flush(self) -> None:
        self.pool.requests.flush()

    @rule(by=st.sampled_from([1, ASK_AGAIN_NS, WAIT_NS]))
    def time_passes(self, by: int) -> None:
        self.pool.now += by

    @rule()
    def take_done(self) -> None:
        for done in self.pool.requests.take_done():
            assert done.job in self.open, "reported twice, or never submitted"
            self.open.remove(done.job)

    @invariant()
    def jobs_are_under_way_or_done(self) -> None:
        waiting = {m.job for m in self.pool.inbox if isinstance(m, Store | Load)}
        assert self.pool.requests.num_jobs == len(waiting)
        assert waiting <= self.open

    def teardown(self) -> None:
        """After the loss of the pool every job has an end, and every lookup an answer."""
        self.pool.lose()
        self.take_done()
        assert self.open == set()
        for request in REQUESTS:
            for key in KEYS:
                self.pool.requests.look_up(request, key)
        self.pool.requests.flush()
        self.pool.now += WAIT_NS
        for request in REQUESTS:
            for key in KEYS:
                assert self.pool.requests.look_up(request, key) is not BlockState.WAIT


TestJobsAndLookups = JobsAndLookups.TestCase
TestJobsAndLookups.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@pytest.fixture
def pool() -> Pool:
    return Pool()


def ask(pool: Pool) -> list[BlockState]:
    return [pool.requests.look_up("one", key) for key in KEYS]


def test_questions_of_one_step_go_out_as_one_message(pool: Pool) -> None:
    pool.requests.begin("one", TRANSFER, "prfaas-pool", WAIT_NS)
    assert ask(pool) == ask(pool) == [BlockState.WAIT] * 4
    pool.requests.flush()
    pool.requests.flush()
    (lookup,) = pool.lookups()
    assert lookup.keys == KEYS
    assert (lookup.transfer_id, lookup.source) == (TRANSFER, "prfaas-pool")
    pool.answer(HIT)
    assert ask(pool) == [BlockState.HIT] * 4


def test_what_is_on_its_way_is_asked_again_and_missing_at_the_deadline(pool: Pool) -> None:
    pool.requests.begin("one", TRANSFER, "prfaas-pool", WAIT_NS)
    ask(pool)
    pool.requests.flush()
    pool.answer(ON_ITS_WAY)
    pool.now = ASK_AGAIN_NS - 1
    pool.requests.flush()
    assert pool.lookups() == []
    pool.now = ASK_AGAIN_NS
    pool.requests.flush()
    assert [lookup.keys for lookup in pool.lookups()] == [KEYS]
    assert ask(pool) == [BlockState.WAIT] * 4
    pool.answer(ON_ITS_WAY)
    pool.now = WAIT_NS - 1
    assert ask(pool) == [BlockState.WAIT] * 4
    pool.now = WAIT_NS
    assert ask(pool) == [BlockState.MISS] * 4


def test_what_arrives_while_waited_for_is_a_hit(pool: Pool) -> None:
    pool.requests.begin("one", TRANSFER, "prfaas-pool", WAIT_NS)
    ask(pool)
    pool.requests.flush()
    pool.answer(ON_ITS_WAY)
    pool.now = ASK_AGAIN_NS
    pool.requests.flush()
    pool.answer(HIT)
    assert ask(pool) == [BlockState.HIT] * 4


@pytest.mark.parametrize("wait_ns", [0, WAIT_NS, 3 * ANSWER_MAX_NS])
def test_a_pool_node_that_hangs_is_not_waited_for_forever(pool: Pool, wait_ns: int) -> None:
    pool.requests.begin("one", TRANSFER, "prfaas-pool", wait_ns)
    ask(pool)
    pool.requests.flush()
    limit = max(wait_ns, ANSWER_MAX_NS)
    pool.now = limit - 1
    assert ask(pool) == [BlockState.WAIT] * 4
    pool.now = limit
    assert ask(pool) == [BlockState.MISS] * 4


def test_an_answer_for_fewer_keys_leaves_the_rest_missing(pool: Pool) -> None:
    ask(pool)
    pool.requests.flush()
    (lookup,) = pool.lookups()
    pool.requests.on_message(LookupDone(job=lookup.job, found=bytes([HIT])))
    assert ask(pool) == [BlockState.HIT, BlockState.MISS, BlockState.MISS, BlockState.MISS]


@pytest.mark.parametrize("loaded", [b"", b"\1", b"\1" * 5])
def test_a_load_answered_for_other_keys_than_asked_is_no_load(pool: Pool, loaded: bytes) -> None:
    pool.requests.submit(Load(job=1, keys=KEYS, rows=[0, 1, 2, 3]))
    pool.requests.on_message(LoadDone(job=1, loaded=loaded))
    (done,) = pool.requests.take_done()
    assert not done.ok
    assert done.loaded == [False] * 4


def test_a_load_says_which_blocks_are_good(pool: Pool) -> None:
    pool.requests.submit(Load(job=1, keys=KEYS, rows=[0, 1, 2, 3]))
    pool.requests.on_message(LoadDone(job=1, loaded=b"\1\0\1\1"))
    (done,) = pool.requests.take_done()
    assert not done.ok
    assert done.loaded == [True, False, True, True]


def test_what_is_forgotten_counts_as_missing(pool: Pool) -> None:
    ask(pool)
    pool.requests.flush()
    pool.answer(HIT)
    pool.requests.forget("one", KEYS[1:2])
    assert ask(pool) == [BlockState.HIT, BlockState.MISS, BlockState.HIT, BlockState.HIT]


def test_what_was_on_its_way_is_missing_once_the_pool_is_gone(pool: Pool) -> None:
    pool.requests.begin("one", TRANSFER, "prfaas-pool", WAIT_NS)
    ask(pool)
    pool.requests.flush()
    pool.answer(ON_ITS_WAY)
    pool.lose()
    assert ask(pool) == [BlockState.MISS] * 4


def test_requests_come_and_go_while_the_pool_is_lost(pool: Pool) -> None:
    """The reader thread reports the loss while the scheduler begins requests."""
    failures: list[BaseException] = []
    stop = threading.Event()

    def lose() -> None:
        try:
            while not stop.is_set():
                pool.requests.on_lost()
        except RuntimeError as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    reader = threading.Thread(target=lose)
    reader.start()
    try:
        for number in range(3000):
            pool.requests.begin(str(number), None, "", 0)
            if number >= 50:
                pool.requests.end(str(number - 50))
    finally:
        stop.set()
        reader.join()
        sys.setswitchinterval(interval)
    assert failures == []


def waiting(pool: Pool, keys: list[Key] = KEYS) -> None:
    """A request has asked for its blocks, and all are on their way."""
    pool.requests.begin("one", TRANSFER, "prfaas-pool", 10 * WAIT_NS)
    assert not pool.requests.must_wait("one")
    for key in keys:
        pool.requests.look_up("one", key)
    pool.requests.flush()
    pool.answer(ON_ITS_WAY)


def test_a_request_must_wait_until_an_answer_changes(pool: Pool) -> None:
    waiting(pool)
    assert not pool.requests.must_wait("one"), "the first answer is news"
    assert ask(pool) == [BlockState.WAIT] * 4
    assert pool.requests.must_wait("one")
    pool.now = ASK_AGAIN_NS
    pool.requests.flush()
    pool.answer(ON_ITS_WAY)
    assert pool.requests.must_wait("one"), "the same answer is no news"
    pool.now = 2 * ASK_AGAIN_NS
    pool.requests.flush()
    pool.answer(HIT)
    assert not pool.requests.must_wait("one")
    assert ask(pool) == [BlockState.HIT] * 4


def test_a_request_that_waits_in_vain_looks_up_again_at_its_deadline(pool: Pool) -> None:
    waiting(pool)
    pool.requests.must_wait("one")
    ask(pool)
    pool.now = 10 * WAIT_NS - 1
    assert pool.requests.must_wait("one")
    pool.now = 10 * WAIT_NS
    assert not pool.requests.must_wait("one")
    assert ask(pool) == [BlockState.MISS] * 4


@pytest.mark.parametrize("lose", [True, False])
def test_a_lost_pool_or_block_is_news(pool: Pool, lose: bool) -> None:
    waiting(pool)
    pool.requests.must_wait("one")
    ask(pool)
    pool.lose() if lose else pool.requests.forget("one", KEYS[:1])
    assert not pool.requests.must_wait("one")
    assert ask(pool)[0] is BlockState.MISS


def test_the_end_of_a_transfer_has_its_blocks_asked_for_at_once(pool: Pool) -> None:
    waiting(pool)
    pool.requests.on_message(TransferOver(transfer_id=b"o" * 16))
    pool.requests.flush()
    assert pool.lookups() == []
    pool.requests.on_message(TransferOver(transfer_id=TRANSFER))
    pool.requests.flush()
    assert [lookup.keys for lookup in pool.lookups()] == [KEYS]
    pool.answer(MISS)
    assert ask(pool) == [BlockState.MISS] * 4


def test_a_long_prompt_is_asked_for_less_often(pool: Pool) -> None:
    """Seven thousand blocks, as of 115K tokens, for ten seconds."""
    keys: list[Key] = [(0, number.to_bytes(32)) for number in range(7000)]
    waiting(pool, keys)
    asked = 0
    while pool.now < 10 * ASK_AGAIN_MAX_NS:
        pool.now += ASK_AGAIN_NS
        pool.requests.flush()
        asked += sum(len(lookup.keys) for lookup in pool.lookups())
        pool.answer(ON_ITS_WAY)
    assert asked <= 18 * len(keys)
    pool.now += ASK_AGAIN_MAX_NS
    pool.requests.flush()
    assert pool.lookups() == [], "nothing is asked after the deadline"


def test_what_came_is_asked_for_once_more_before_the_deadline(pool: Pool) -> None:
    keys: list[Key] = [(0, number.to_bytes(32)) for number in range(7000)]
    waiting(pool, keys)
    pool.now = 10 * WAIT_NS - 2 * ASK_AGAIN_NS
    pool.requests.flush()
    pool.answer(ON_ITS_WAY)
    pool.now += ASK_AGAIN_NS
    pool.requests.flush()
    [lookup] = pool.lookups()
    assert len(lookup.keys) == len(keys)
    pool.answer(HIT)
    assert pool.requests.look_up("one", keys[0]) is BlockState.HIT


def test_what_became_of_the_blocks_of_a_transfer_is_known_at_the_end(pool: Pool) -> None:
    waiting(pool)
    pool.requests.on_message(TransferOver(transfer_id=TRANSFER))
    pool.requests.flush()
    (lookup,) = pool.lookups()
    found = bytes([HIT, MISS, ON_ITS_WAY, HIT])
    pool.requests.on_message(LookupDone(job=lookup.job, found=found))
    pool.requests.look_up("one", (0, b"n" * 32))
    pool.requests.flush()
    assert pool.requests.end("one") == Lookups(2, 1, 1, 1)
    assert pool.requests.end("one") is None
    pool.requests.look_up("local", KEYS[0])
    assert pool.requests.end("local") is None


def test_nothing_is_waited_for_where_nothing_is_awaited(pool: Pool) -> None:
    pool.requests.wait_for_news(3600)
    waiting(pool)
    pool.requests.wait_for_news(3600)  # Its answer came since.
    pool.lose()
    pool.requests.wait_for_news(3600)
    pool.requests.wait_for_news(3600)


@pytest.mark.parametrize("awaits", ["blocks", "job"])
def test_whoever_waits_for_news_is_woken_by_them(pool: Pool, awaits: str) -> None:
    if awaits == "job":
        pool.requests.submit(Store(job=1, keys=KEYS[:1], rows=[0]))
    else:
        waiting(pool)
        pool.requests.wait_for_news(3600)
    woken = threading.Thread(target=pool.requests.wait_for_news, args=(3600,))
    woken.start()
    pool.requests.on_message(
        StoreDone(job=1, stored=True) if awaits == "job" else TransferOver(transfer_id=TRANSFER)
    )
    woken.join(timeout=30)
    assert not woken.is_alive()
