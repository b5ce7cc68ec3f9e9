"""Keep rules: which blocks a pool node may keep and read, and until when.

Gateways give orders with a scope, an effect and an end: purge blocks, pin them, limit their age,
share memory. One object has those in force; memory, disk and shared tiers ask it, and none has
rules of its own. What goes first among blocks that may stay is the order of eviction
(`tenant_shares.py`), which gets shares and pins from here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from prfaas.core.cache.eviction import GRAIN_S, UNKNOWN_S, MaxAges
from prfaas.core.cache.tenant_shares import Share
from prfaas.core.kv.blocks import BlockName

EVERY = "*"
"""Stands for any pool; no pool can have this name."""
SCOPES_MAX = 4096
"""Sources, and tenants, whose last purge is remembered; the oldest is forgotten."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a block (`pool/store/origins.py`)."""

    sources: frozenset[str] = frozenset()
    """Pools that it came from, or was computed from; EVERY among them stands for any."""
    via: str = ""
    """The engine or pool that handed it over."""
    transfer_id: bytes = b""
    """The transfer, and so the ticket, that it came with; empty for an engine's."""
    tenant: str = ""
    """Tag of the tenant that it belongs to (`core/kv/tenant_salts.py`); empty if unknown."""
    born_s: int = UNKNOWN_S
    """Unix time of its computation, seconds (`eviction.py`); 0 if unknown."""

    def is_of(self, source: str) -> bool:
        """Return True if it has to go when `source` is purged."""
        return source in self.sources or EVERY in self.sources

    @property
    def sender(self) -> str:
        """Pool that sent it over a link, also if another node read it from a shared tier.

        Empty if it was computed at this site, or the sender cannot be told from other names.
        """
        others = self.sources - {EVERY, self.via}
        if not self.transfer_id or len(others) > 1:
            return ""
        return next(iter(others), self.via)


Matches = Callable[[Origin], bool]
"""Depends on the sources, the tenant and the time of an origin alone."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Blocks that an order is about: those of a source, of a tenant, or of one prompt."""

    source: str = ""
    """Name of a pool; not used with a tenant."""
    tenant: str | None = None
    """Tag of the tenant, empty for blocks without one; None for a source."""
    hashes: frozenset[bytes] | None = None
    """Of the blocks of a prompt of that tenant; None for all blocks."""

    def matches(self, origin: Origin) -> bool:
        """Return True if blocks of that origin are meant; of a prompt, also those of no tenant."""
        if self.tenant is None:
            return origin.is_of(self.source)
        return origin.tenant == self.tenant or (self.hashes is not None and not origin.tenant)

    def covers(self, origin: Origin, pool: str) -> bool:
        """The same for blocks of a pool node: if that is the source, all are."""
        return (self.tenant is None and self.source == pool) or self.matches(origin)

    def has(self, name: BlockName) -> bool:
        """Return True if a block is of the prompt, or none is named."""
        return self.hashes is None or name[1].block_hash in self.hashes

    def __str__(self) -> str:
        if self.hashes is not None:
            return "prefix"
        return f"source {self.source}" if self.tenant is None else f"tenant {self.tenant or '-'}"


class Effect(StrEnum):
    """Effect of an order."""

    PURGE = "purge"
    """Blocks of the scope are dropped, and none is taken until the end."""
    PIN = "pin"
    """Blocks of the scope stay in memory until the end."""


BAR_NS = 120 * 10**9
"""Longest end of a purge: a gateway that dies in between leaves a bar."""
ORDERS_MAX = {Effect.PURGE: 256, Effect.PIN: 64}
"""Orders of one gateway that have not ended; more are refused."""
OrderKey = tuple[str, Effect, Scope | bytes]
"""Gateway, effect, and scope; of a pin the digest of its hashes, in order."""


class PurgeTimes:
    """The last purge of each source and tenant. A look-up costs the same however many there are.

    That a block is gone elsewhere is the word of others: of a pool node at the other end of a link,
    a shared tier, or a disk that was restored. So what was made before a purge is refused for good.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, float] = {}
        self._sources: dict[str, float] = {}
        self._of_any = 0.0
        """The last purge of any source: what is EVERY's goes with each."""

    def note(self, scope: Scope, at: float) -> None:
        """A purge began; any unit of time, always the same."""
        if scope.tenant is None:
            times, name, self._of_any = self._sources, scope.source, max(at, self._of_any)
        else:
            times, name = self._tenants, scope.tenant
        times[name] = max(at, times.pop(name, 0.0))
        if len(times) > SCOPES_MAX:
            del times[next(iter(times))]

    def of_tenant(self, tenant: str) -> float:
        """Time of the last purge of a tenant; 0 without."""
        return self._tenants.get(tenant, 0.0)

    def is_before(self, origin: Origin, made: float, holder: str) -> bool:
        """Return True if a block was made before a purge of its source or tenant.

        Args:
            made: When it was made at the latest.
            holder: A pool of which it is as well.
        """
        if made <= self._tenants.get(origin.tenant, 0.0):
            return True
        if made > self._of_any:
            return False
        sources = self._sources
        return (
            EVERY in origin.sources
            or made <= sources.get(holder, 0.0)
            or any(made <= sources.get(each, 0.0) for each in origin.sources)
        )


class KeepRules:
    """The rules in force at one pool node.

    Args:
        pool: Its name: everything it holds is of itself.
        regions: Where its blocks rest; without any, everywhere.
        now_s: Unix time, seconds; asked only while there is a maximum age.
    """

    def __init__(
        self,
        pool: str = "",
        regions: frozenset[str] = frozenset(),
        now_s: Callable[[], float] = float,
    ) -> None:
        self.pool, self.regions, self._now_s = pool, regions, now_s
        self._ends: dict[OrderKey, int] = {}
        """Time when each order ends, ns."""
        self._bars: list[Scope] = []
        self._barred_hashes: frozenset[bytes] = frozenset()
        self._purges = PurgeTimes()
        self._announced: dict[str, tuple[Mapping[str, int], Mapping[str, Share]]] = {}
        self.ages = MaxAges()
        """Maximum ages of blocks: the strictest of all gateways."""
        self.shares: dict[str, Share] = {}
        """Shares of tenants, by tag."""

    # --- questions ---

    def may_read(self, origin: Origin) -> bool:
        """Return False if blocks of an origin are misses: too old, or of before a purge."""
        born_s = origin.born_s
        if born_s != UNKNOWN_S and self._purges.is_before(origin, born_s + GRAIN_S, self.pool):
            return False
        return not (self.ages and self.is_over(origin))

    def may_keep(self, origin: Origin, block_hash: bytes = b"") -> bool:
        """Return False if blocks of an origin, or with a hash, are not taken at present."""
        if self._ends and (
            block_hash in self._barred_hashes
            or any(scope.covers(origin, self.pool) for scope in self._bars)
        ):
            return False
        return self.may_read(origin)

    def is_over(self, origin: Origin) -> bool:
        """Return True if blocks of an origin are too old."""
        return self.ages.is_over(origin.tenant, origin.born_s, self._now_s())

    def matcher(self, scope: Scope) -> Matches:
        """Return the test of a scope for the origins of blocks of this pool node."""
        return lambda origin: scope.covers(origin, self.pool)

    # --- orders ---

    def order(self, key: OrderKey, until_ns: int) -> str:
        """Put an order in force until a time, or give it a new end; return why not, or nothing."""
        gateway, effect, _ = key
        limit = ORDERS_MAX[effect]
        if key not in self._ends and limit <= sum(each[:2] == key[:2] for each in self._ends):
            return f"{gateway} has {limit} {effect}s here, the limit; end one"
        self._ends[key] = until_ns
        self._find_bars()
        return ""

    def end(self, key: OrderKey) -> bool:
        """End an order; return True if it was in force."""
        was_in_force = self._ends.pop(key, None) is not None
        self._find_bars()
        return was_in_force

    @property
    def orders(self) -> Collection[OrderKey]:
        """The orders in force."""
        return self._ends.keys()

    def expire(self, now_ns: int) -> list[OrderKey]:
        """End the orders whose time is over, and return them."""
        over = [key for key, until_ns in self._ends.items() if until_ns <= now_ns]
        for key in over:
            self.end(key)
        return over

    def purged(self, scope: Scope, at_s: float) -> None:
        """A purge of a source or tenant began, Unix time in seconds: older blocks are misses."""
        self._purges.note(scope, at_s)

    def announced(self, gateway: str, ages: Mapping[str, int], shares: Mapping[str, Share]) -> None:
        """Replace what a gateway announced: maximum ages, seconds, and shares, by tag.

        Gateways of one deployment announce the same shares.
        """
        self._announced[gateway] = ages, shares
        self.ages = MaxAges(ages for ages, _ in self._announced.values())
        self.shares = {}
        for _, each in self._announced.values():
            self.shares |= each

    def validate(self) -> None:
        """See that no gateway has too many orders, and that bars are those of the orders;
        AssertionError if they are not."""
        for each in {key[:2] for key in self._ends}:
            num = sum(key[:2] == each for key in self._ends)
            if num > ORDERS_MAX[each[1]]:
                raise AssertionError(f"{each[0]} has {num} orders to {each[1]}")
        bars = self._bars, self._barred_hashes
        self._find_bars()
        if bars != (self._bars, self._barred_hashes):
            raise AssertionError("the bars are not those of the orders")

    def _find_bars(self) -> None:
        scopes = [what for _, _, what in self._ends if isinstance(what, Scope)]
        self._bars = [scope for scope in scopes if scope.hashes is None]
        self._barred_hashes = frozenset().union(*(scope.hashes or () for scope in scopes))
