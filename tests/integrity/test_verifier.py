"""Verification: what is compared, what is an alarm, and who is barred."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from prfaas.core.control.changes import ChangeEntry, Loop
from prfaas.core.kv.blocks import CacheGroup, GroupKind, HashScheme, Layout
from prfaas.core.kv.difference_limits import LIMITS, is_altered
from prfaas.core.kv.naming.hash_chain import hash_chain
from prfaas.core.kv.naming.prompt_names import prompt_hashes
from prfaas.core.kv.tenant_salts import tenant_tag
from prfaas.core.request.facts import PrefixCopied
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.errors import PeerError, RequestError
from prfaas.integrity.barring import Barring
from prfaas.integrity.metrics import VerificationMetrics
from prfaas.integrity.received import Received
from prfaas.integrity.verifier import TRIES_MAX, WAITING_MAX, Copies, Verifier
from prfaas.wire.messages.comparing import Altered, Compared
from prfaas.wire.messages.fields import Key

from .views import View

LAYOUT = Layout(
    b"\1" * 32,
    16,
    "0",
    (
        CacheGroup(0, GroupKind.FULL_ATTENTION, 16, 64),
        CacheGroup(1, GroupKind.LINEAR_STATE, 32, 128),
    ),
)
TOKENS = list(range(200))
SALT = "tenant"


@dataclass
class World:
    """An engine and a pool as a test wants them."""

    worst: dict[str, float] = field(default_factory=lambda: {"bfloat16": 1e-3})
    num_missing: int = 0
    sender: str = "prfaas-pool"
    """Sender of altered blocks."""
    num_compares: int = 0
    alarms: list[str] = field(default_factory=list)
    suspected: list[tuple[str, str]] = field(default_factory=list)
    stopped: list[View] = field(default_factory=list)
    computes: bool = True
    fault: PeerError | None = None
    """Raised in place of an answer of the pool."""
    salts: list[str] = field(default_factory=list)
    pairs: list[tuple[Key, Key]] = field(default_factory=list)
    barred: list[tuple[str, str]] = field(default_factory=list)
    is_held: asyncio.Event = field(default_factory=asyncio.Event)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        self.is_held.set()

    async def compute(self, engine: str, token_ids: Sequence[int], salt: str) -> bool:
        assert (engine, list(token_ids)) == ("pd-engine", TOKENS)
        self.salts.append(salt)
        await self.is_held.wait()
        return self.computes

    async def compare(
        self,
        pool: str,
        layout_id: bytes,
        pairs: Sequence[tuple[Key, Key]],
        limits: Mapping[str, float],
    ) -> Compared:
        if self.fault is not None:
            raise self.fault
        assert (pool, layout_id) == ("pd-pool", LAYOUT.layout_id)
        self.pairs = list(pairs)
        self.num_compares += 1
        num_missing = min(self.num_missing, len(pairs))
        num_there = len(pairs) - num_missing
        sent_by = [Altered(n, self.sender, is_inherited=False) for n in range(num_there)]
        return Compared(
            job=1,
            num_equal=0,
            num_different=num_there,
            num_missing=num_missing,
            worst=self.worst if num_there else {},
            altered=sent_by if is_altered(self.worst, limits) else [],
            missing=list(range(num_there, len(pairs))),
        )

    async def bar(self, source: str, why: str) -> None:
        self.barred.append((source, why))

    def alarm(self, why: str) -> None:
        self.alarms.append(why)

    def suspect(self, source: str, why: str) -> None:
        self.suspected.append((source, why))

    def stop(self, view: Any, why: str) -> None:
        self.stopped.append(view)
        view.end = TransferEnd.ABORTED

    def verifier(self, one_in: int | None = 1, **limits: float) -> Verifier:
        site: Any = self
        return Verifier(
            one_in,
            limits,
            site,
            site,
            VerificationMetrics(self.registry),
            random.Random(1).randrange,
            pause_s=0,
        )

    def outcomes(self, outcome: str) -> float:
        labels = {"outcome": outcome}
        return self.registry.get_sample_value("prfaas_verifications_total", labels) or 0


def received(view: View | None = None, have_tokens: int = 32) -> Received:
    hashes = hash_chain(TOKENS, tokens_per_hash=16, seed="0", cache_salt=SALT)
    view = view or View()
    return Received(
        view.destination,
        frozenset({view.source}),
        [view],
        "pd-engine",
        LAYOUT,
        TOKENS,
        hashes,
        SALT,
        have_tokens,
        final_tokens=192,
    )


async def verified(verifier: Verifier, *transfers: Received) -> None:
    for each in transfers:
        verifier.used(each)
    while verifier._tasks:
        await asyncio.gather(*verifier._tasks)


async def test_shipped_blocks_are_compared_with_those_of_another_salt_of_the_tenant() -> None:
    world = World()
    await verified(world.verifier(), received())
    (salt,) = world.salts
    assert salt != SALT
    assert tenant_tag(salt) == tenant_tag(SALT)
    ours = hash_chain(TOKENS, tokens_per_hash=16, seed="0", cache_salt=SALT)
    theirs = hash_chain(TOKENS, tokens_per_hash=16, seed="0", cache_salt=salt)
    prefix = [((0, ours[n]), (0, theirs[n])) for n in range(2)]
    prefix.append(((1, ours[1]), (1, theirs[1])))
    attention = [((0, ours[n]), (0, theirs[n])) for n in range(2, 12)]
    assert world.pairs == [*prefix, *attention, ((1, ours[11]), (1, theirs[11]))]
    assert world.outcomes("equal") == 1
    assert not world.barred


def test_blocks_are_named_by_the_scheme_of_their_layout() -> None:
    pages = replace(LAYOUT, hash_scheme=HashScheme.SGLANG_PAGES, groups=LAYOUT.groups[:1])
    ours, theirs = (prompt_hashes(pages, TOKENS, salt) for salt in (SALT, "other"))
    pairs = replace(received(), layout=pages, hashes=ours).pairs("other")
    assert [each.names for each in pairs] == [((0, ours[n]), (0, theirs[n])) for n in range(12)]
    assert [each.position for each in pairs if each.is_shipped] == list(range(2, 12))


async def test_states_that_may_be_checkpoints_are_compared_beside_the_others() -> None:
    """Most of them were never kept: that some are missing excuses and delays nothing."""
    plain, spaced = received(), received()
    spaced = replace(spaced, layout=replace(LAYOUT, checkpoint_tokens=32))
    names = [each.names[0] for each in plain.pairs("other")]
    pairs = spaced.pairs("other")
    assert [each.names[0] for each in pairs if not each.is_extra] == names
    extra = [each.names[0] for each in pairs if each.is_extra]
    assert [group for group, _ in extra] == [1] * 4
    world = World()
    await verified(world.verifier(), spaced)
    assert [ours for ours, _ in world.pairs] == extra
    assert (world.num_compares, world.outcomes("equal")) == (2, 1)


async def test_a_difference_above_the_limit_of_its_type_bars_the_source() -> None:
    world = World(worst={"bfloat16": 1.1 * LIMITS["bfloat16"], "float32": 0.0})
    await verified(world.verifier(), received())
    ((source, why),) = world.barred
    assert source == "prfaas-pool"
    assert "bfloat16 differs by 0.33, limit 0.3" in why
    assert world.outcomes("altered") == 1


async def test_altered_blocks_of_no_known_sender_raise_an_alarm_alone() -> None:
    world = World(worst={"bfloat16": 1.0}, sender="")
    await verified(world.verifier(), received())
    assert (world.barred, world.outcomes("unattributed")) == ([], 1)
    assert "blocks of a transfer are not what engine pd-engine computes" in world.alarms[0]


async def test_only_missing_blocks_are_asked_for_again_and_not_for_ever() -> None:
    world = World(num_missing=3)
    await verified(world.verifier(), received())
    assert len(world.pairs) == 3
    assert world.num_compares == TRIES_MAX
    assert world.outcomes("equal") == 1


async def test_limits_of_the_deployment_take_precedence() -> None:
    world = World(worst={"bfloat16": 0.4})
    await verified(world.verifier(bfloat16=0.5), received())
    assert (world.outcomes("equal"), world.barred) == (1, [])


@pytest.mark.parametrize("fields", [{"computes": False}, {"num_missing": 14}])
async def test_what_cannot_be_compared_is_neither_equal_nor_altered(fields: dict[str, Any]) -> None:
    world = World(worst={"bfloat16": 1.0}, **fields)
    await verified(world.verifier(), received())
    assert (world.outcomes("unknown"), world.barred) == (1, [])


@pytest.mark.parametrize("end", [*TransferEnd, None])
async def test_blocks_are_compared_however_their_transfer_ended(end: TransferEnd | None) -> None:
    """Blocks that the pool kept are compared, whether their source commits, stops or is silent."""
    world = World(worst={"bfloat16": 1.0})
    view = View(end)
    await verified(world.verifier(), received(view))
    assert [source for source, _ in world.barred] == ["prfaas-pool"]
    assert world.outcomes("altered") == 1
    assert world.stopped == ([] if end else [view])


async def test_a_transfer_that_brought_nothing_is_not_computed_again() -> None:
    world = World()
    await verified(world.verifier(), received(View(TransferEnd.REFUSED, num_bytes=0)))
    assert (world.outcomes("empty"), world.salts) == (1, [])


async def test_open_transfers_are_ended_after_their_request_selected_or_not() -> None:
    """So nothing arrives after a comparison, and no source learns which ones are compared."""
    world = World()
    verifier, views = world.verifier(10), [View(None) for _ in range(10)]
    await verified(verifier, *map(received, views))
    await asyncio.sleep(0)  # The calls that were due at once.
    assert sorted(map(id, world.stopped)) == sorted(map(id, views))
    assert sum(map(world.outcomes, ("equal", "altered", "unknown"))) == 1


async def test_all_sources_of_a_prompt_are_sampled() -> None:
    """One is barred by what another one's transfer showed."""
    world = World(worst={"bfloat16": 1.0}, sender="other-pool")
    both = replace(received(), sources=frozenset({"prfaas-pool", "other-pool"}))
    await verified(world.verifier(), both)
    assert [source for source, _ in world.barred] == ["other-pool"]


@pytest.mark.parametrize("end", [TransferEnd.ABORTED, TransferEnd.ENGINE_LOST, None])
async def test_a_source_that_stops_complete_transfers_is_suspect(end: TransferEnd | None) -> None:
    world = World()
    await verified(world.verifier(), *(received(View(end)) for _ in range(3)))
    ((source, why),) = world.suspected
    assert source == "prfaas-pool"
    assert "end without a commit" in why


async def test_honest_ends_of_transfers_are_not_suspect() -> None:
    """Those that their request gave up, and those that broke on their way."""
    world, given_up = World(), View(TransferEnd.ABORTED, is_given_up=True)
    broken = View(TransferEnd.LINK_LOST, num_bytes=100)
    await verified(world.verifier(), *map(received, [View(), given_up, broken] * 8))
    assert world.suspected == []


async def test_a_source_of_unknown_results_is_suspect() -> None:
    world = World(num_missing=14)
    await verified(world.verifier(), *(received() for _ in range(14)))
    assert [why.split()[0] for _, why in world.suspected] == ["most", "most"]
    labels = {"reason": "unknown"}
    assert world.registry.get_sample_value("prfaas_verification_suspicions_total", labels) == 2


def test_a_copy_is_offered_at_its_first_use() -> None:
    copies, hashes = Copies(), [bytes([n]) * 32 for n in range(4)]
    copies.note(PrefixCopied("prfaas-pool", "pd-pool", hashes[:3]))
    assert copies.take("pd-pool-2", hashes) == frozenset()
    assert copies.take("pd-pool", hashes[:2]) == frozenset()
    assert copies.take("pd-pool", hashes) == {"prfaas-pool"}
    assert copies.take("pd-pool", hashes) == frozenset()


async def test_a_pool_that_does_not_answer_is_no_alarm() -> None:
    world = World()

    world.fault = PeerError("not connected")
    await verified(world.verifier(), received())
    assert (world.outcomes("unknown"), world.barred) == (1, [])


async def test_without_the_setting_nothing_is_computed() -> None:
    world = World()
    verifier = world.verifier(None)
    assert not verifier.is_on
    await verified(verifier, received())
    assert world.salts == []


async def test_waiting_verifications_are_bounded() -> None:
    world = World()
    world.is_held.clear()
    verifier = world.verifier()
    for _ in range(WAITING_MAX + 5):
        verifier.used(received())
    assert world.outcomes("skipped") == 5
    world.is_held.set()
    await verified(verifier)
    assert world.outcomes("equal") == WAITING_MAX


@dataclass
class FakeEngine:
    name: str
    pool: str
    role: str
    num_in_flight: int = 0


class Gateway:
    """Engines, routes and purges of a gateway."""

    def __init__(self, *, is_busy: bool = False) -> None:
        engines = (FakeEngine("away", "prfaas-pool", "prfaas"), FakeEngine("home", "pd-pool", "pd"))
        self.by_name = {each.name: each for each in engines}
        self.drained: set[str] = set()
        self.purges: list[str] = []
        self.notes: list[tuple[Loop, str, str]] = []
        self._is_busy = is_busy

    def is_drained(self, name: str) -> bool:
        return name in self.drained

    def set_drained(self, name: str, now_ns: int, *, drained: bool) -> None:
        (self.drained.add if drained else self.drained.discard)(name)

    async def purge(
        self, source: str, *, is_dry: bool, loop: Loop = Loop.OPERATOR
    ) -> dict[str, object]:
        assert self.drained or not self.by_name, (
            "blocks are dropped before nothing new is sent there"
        )
        if self._is_busy:
            self._is_busy = False
            raise RequestError("a purge is running", status=409)
        self.purges.append(source)
        return {"is_complete": False}  # The gateway repeats it where it failed.

    def note(self, loop: Loop, action: str, what: str, **fields: Any) -> ChangeEntry:
        self.notes.append((loop, action, what))
        return ChangeEntry(1, 0.0, loop, action, what, **fields)


@pytest.mark.parametrize("is_busy", [False, True])
async def test_a_barred_source_gets_nothing_new_and_is_purged(*, is_busy: bool) -> None:
    gateway: Any = Gateway(is_busy=is_busy)
    barring = Barring(gateway, gateway, gateway, gateway.note, pause_s=0)
    await barring.bar("prfaas-pool", "its blocks differ")
    assert gateway.drained == {"away"}
    assert gateway.purges == ["prfaas-pool"] * 2
    assert gateway.notes == [(Loop.INTEGRITY, "bar", "source prfaas-pool")]
    # A second alarm changes nothing more.
    await barring.bar("prfaas-pool", "its blocks differ")
    assert len(gateway.notes) == 1


@pytest.mark.parametrize("state", ["drained", "gone"])
async def test_a_source_without_engines_in_use_is_purged_and_reported(state: str) -> None:
    """An operator drained them, or they left when it had sent its blocks."""
    gateway: Any = Gateway()
    if state == "drained":
        gateway.drained.add("away")
    else:
        gateway.by_name.clear()
    barring = Barring(gateway, gateway, gateway, gateway.note, pause_s=0)
    for _ in range(2):
        await barring.bar("prfaas-pool", "its blocks differ")
    assert gateway.purges == ["prfaas-pool"] * 2
    assert gateway.notes == [(Loop.INTEGRITY, "bar", "source prfaas-pool")]


async def test_a_pool_of_the_pd_cluster_is_not_barred() -> None:
    gateway: Any = Gateway()
    await Barring(gateway, gateway, gateway, gateway.note, pause_s=0).bar("pd-pool", "it differs")
    assert (gateway.drained, gateway.purges) == (set(), [])
    assert gateway.notes == [(Loop.INTEGRITY, "alarm", "altered blocks")]
