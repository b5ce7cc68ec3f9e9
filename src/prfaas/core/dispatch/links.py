"""The links between pools: what is known of each, its threshold, and who uses it.

State of a link, from what was promised to it and what its pool node reports.

| signal | from | while the report is late or missing |
|---|---|---|
| rate | goodput; until one is measured the operator's budget, else the plan | stays |
| backlog | promised bytes, less those that the report says have arrived | as of the last report |
| utilisation | busy share of the time between two reports | 0 when that is too old |
| mean utilisation | its mean, forgotten with `MEMORY_NS` | decays while nothing is promised |

A link to which nothing is promised is known: it has no backlog, and its rate stays. A link with
promised bytes is unknown when its last report, and the last instant without any, are too old. How
goodput and busy time are counted is in `core/transfer/link_goodput.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from heapq import nlargest
from itertools import repeat
from math import exp, log
from types import MappingProxyType

from prfaas.core.control.threshold_loop import CHANGE_MIN, Balance, Pressures, ThresholdLoop
from prfaas.core.dispatch.types import DispatchSettings, RemoteCluster, ThresholdMoved
from prfaas.core.invariants import hold
from prfaas.core.routing.decision import Reason
from prfaas.core.routing.policies import AdaptivePolicy, make_policy
from prfaas.core.routing.predictions import LinkState, PathSignals
from prfaas.records import Record
from prfaas.units import NS_PER_S

MEMORY_NS = 25 * NS_PER_S
"""Time in which the weight of older intervals in the mean utilisation falls to 1/e."""


class LinkReport(Record, frozen=True):
    """Counters of a link at its sending pool node."""

    observed_at_ns: int
    """Time when they were read."""
    goodput_bits_per_s: float
    """0 until the link was filled once, or if its part of a site's budget held it below the rate
    that it would have now."""
    sent_bytes: int
    """Bytes that have arrived of transfers that are open."""
    busy_ns: int = 0
    """Time in which bytes waited to be sent, since the pool node was started."""
    rtt_ns: int = 0
    budget_bits_per_s: float = 0.0
    """The most that the operator lets the link carry; 0 is no limit. Of an idle link with a part of
    a site's budget, what it would be with something to send."""


class LinkBook:
    """One direction of a link, as a gateway knows it.

    Args:
        stale_after_ns: Age beyond which a report counts as unknown.
        expected_bits_per_s: Rate by the plan, until the first one is measured; 0 is unknown.
    """

    def __init__(self, stale_after_ns: int, expected_bits_per_s: float = 0.0) -> None:
        self._stale_after_ns, self._expected_bits_per_s = stale_after_ns, expected_bits_per_s
        self._report: LinkReport | None = None
        self._sent_bytes = self._promised_bytes = self._idle_until_ns = 0
        self._utilisation = self._mean_utilisation = 0.0
        self.bits_per_s = expected_bits_per_s
        """The last rate, however old; 0 is unknown."""
        self.num_open = 0
        """Transfers that were decided and have not ended."""

    def promise(self, num_bytes: int, now_ns: int) -> None:
        """A transfer of `num_bytes` was decided."""
        if not self._promised_bytes:
            self._idle_until_ns, self._sent_bytes = now_ns, 0
        self._promised_bytes += num_bytes
        self.num_open += num_bytes > 0

    def settle(self, num_bytes: int) -> None:
        """A transfer of `num_bytes` has landed or was aborted."""
        self._promised_bytes -= num_bytes
        self.num_open -= num_bytes > 0

    def report(self, report: LinkReport) -> None:
        """Take a report in; older ones than the last are ignored."""
        before = self._report
        if before is not None and report.observed_at_ns < before.observed_at_ns:
            return
        self._report, self._sent_bytes = report, report.sent_bytes
        rate = report.goodput_bits_per_s or report.budget_bits_per_s
        self.bits_per_s = rate or self._expected_bits_per_s
        if before is None:
            return
        passed_ns = report.observed_at_ns - before.observed_at_ns
        busy_ns = report.busy_ns - before.busy_ns
        if passed_ns > 0 and busy_ns >= 0:
            self._utilisation = use = min(1.0, busy_ns / passed_ns)
            self._mean_utilisation += (1 - exp(-passed_ns / MEMORY_NS)) * (
                use - self._mean_utilisation
            )

    def latest(self, now_ns: int) -> LinkState | None:
        """Return what is known of the link now; None if that is too old, or no rate is known."""
        rate, seen, promised = self.bits_per_s, self._report, self._promised_bytes
        if not rate:
            return None
        seen_at_ns = self._idle_until_ns if seen is None else seen.observed_at_ns
        is_fresh = now_ns - seen_at_ns <= self._stale_after_ns
        if promised and not is_fresh and now_ns - self._idle_until_ns > self._stale_after_ns:
            return None
        backlog, rtt_ns = promised - self._sent_bytes, 0 if seen is None else seen.rtt_ns
        use = self._utilisation if is_fresh else 0.0
        return LinkState(rate, backlog if backlog > 0 else 0, rtt_ns, use)

    def mean_utilisation(self, now_ns: int) -> float:
        """Share of the time lately in which the link was busy, in [0, 1]."""
        if self._report is None:
            return 0.0
        idle_until_ns = self._idle_until_ns if self._promised_bytes else now_ns
        idle_ns = max(0, idle_until_ns - self._report.observed_at_ns)
        return self._mean_utilisation * exp(-idle_ns / MEMORY_NS)

    @property
    def rtt_ns(self) -> int:
        """The last round trip, however old; 0 is unknown."""
        return 0 if self._report is None else self._report.rtt_ns

    def validate(self) -> None:
        """Check what has to hold between two calls (`hold`)."""
        hold(
            promises_are_of_open_transfers=self.num_open >= 0
            and (self._promised_bytes > 0) == (self.num_open > 0)
        )

    @property
    def promised_bytes(self) -> int:
        """Bytes of transfers that have not ended; 0 when all is over."""
        return self._promised_bytes


SITE_BITS_PER_S = 10e9
"""Rate of a link between two hosts of a cluster, until one is measured."""


class Link:
    """One direction between two pools.

    Args:
        settings: How requests are routed.
        cluster: The PrfaaS cluster at one end alone; None is unknown, or there is none.
        expected_bits_per_s: Its rate without such a cluster, until one is measured; 0 is unknown.
        is_in_site: Both pools are hosts of one cluster.
    """

    def __init__(
        self,
        source: str,
        destination: str,
        settings: DispatchSettings,
        cluster: RemoteCluster | None = None,
        expected_bits_per_s: float = 0.0,
        *,
        is_in_site: bool = False,
    ) -> None:
        self.source, self.destination, self.is_in_site = source, destination, is_in_site
        self.why_down: Reason | None = Reason.LINK_DOWN
        """One of `UNREACHABLE`; None while it is up."""
        price_per_tb = 0.0
        if cluster is not None:
            expected_bits_per_s, price_per_tb = cluster.link_bits_per_s, cluster.price_per_tb
        self.book = LinkBook(settings.stale_after_ns, expected_bits_per_s)
        self.ns_per_byte = settings.ns_per_byte(price_per_tb)
        """Worth of a byte, as time."""
        self.policy = make_policy(
            settings.policy, settings.offload_threshold, settings.bandwidth, settings.ttft_max_ns
        )
        self.balance = Balance(settings.offload_threshold)
        self.is_held = False
        """True if the operator has set the threshold: no loop moves it."""
        self._planned = settings.offload_threshold
        self._loop = ThresholdLoop(max(settings.offload_threshold, 1))

    @property
    def up(self) -> bool:
        """Return True if blocks can be sent over it."""
        return self.why_down is None

    def signals(
        self,
        local_wait_ns: int | None,
        remote_wait_ns: int | None,
        now_ns: int,
    ) -> PathSignals:
        """State of both paths."""
        link = self.book.latest(now_ns)
        return PathSignals(local_wait_ns, remote_wait_ns, link, self.book.num_open)

    @property
    def offload_threshold(self) -> int | None:
        """Threshold, tokens; None between hosts of one cluster, where it decides nothing."""
        return None if self.is_in_site else self.policy.offload_threshold

    def replan(self, offload_threshold: int) -> int | None:
        """Start over from another planned threshold, tokens, above 0.

        Returns:
            The one before; None if it stays: the operator has set it, or it is this one.
        """
        self._planned = offload_threshold
        return None if self.is_held else self._start_over(offload_threshold)

    def hold(self, offload_threshold: int | None) -> None:
        """The operator sets the threshold, tokens; None gives it back to file, plan and loops."""
        self.is_held = offload_threshold is not None
        self._start_over(self._planned if offload_threshold is None else offload_threshold)

    def _start_over(self, offload_threshold: int) -> int | None:
        before = self.policy.offload_threshold
        self.policy.offload_threshold = offload_threshold
        self.balance.replan(offload_threshold)
        self._loop.replan(max(offload_threshold, 1))
        return None if before == offload_threshold else before

    def learn(
        self, num_local: float, num_remote: float, now_ns: int, least: int = 1
    ) -> ThresholdMoved | None:
        """Adjust the threshold to recent arrivals; see `balance`. None when it stays.

        Args:
            num_local: Instances that prefill locally.
            num_remote: Instances of the remote cluster that this link has to itself.
            least: The lowest threshold, tokens.
        """
        seen = self.book.latest(now_ns)
        if seen is None or self.is_held or not isinstance(self.policy, AdaptivePolicy):
            return None
        found = self.balance.evidence(num_local, num_remote, seen.bits_per_s)
        if found is None:
            return None
        before, now = self.policy.offload_threshold, max(found.threshold, least)
        if abs(log(now / max(before, 1))) < CHANGE_MIN:
            return None
        self.policy.offload_threshold = now
        return ThresholdMoved(self.source, self.destination, before, now, evidence=found)

    def move(
        self, local_wait_ns: int | None, remote_wait_ns: int | None, now_ns: int, least: int = 1
    ) -> ThresholdMoved | None:
        """One interval of the short-term loop; None when the threshold stays."""
        if self.is_held or not isinstance(self.policy, AdaptivePolicy):
            return None
        seen, before = self.book.latest(now_ns), self.policy.offload_threshold
        if remote_wait_ns is not None and seen is not None:
            remote_wait_ns = max(remote_wait_ns, round(seen.drain_ns()))
        use = None if seen is None else seen.utilisation
        pressures = Pressures(use, local_wait_ns, remote_wait_ns)
        self.policy.offload_threshold = max(self._loop.update(now_ns, pressures), least)
        if self.policy.offload_threshold == before:
            return None
        now = self.policy.offload_threshold
        return ThresholdMoved(self.source, self.destination, before, now, pressures)


class Links:
    """Links by their two pools, made when they are first named.

    Args:
        settings: How requests are routed.
        clusters: PrfaaS clusters by pool.
        site: Pools of the PD cluster.
    """

    def __init__(
        self,
        settings: DispatchSettings,
        clusters: Mapping[str, RemoteCluster] = MappingProxyType({}),
        site: Collection[str] = (),
    ) -> None:
        self._settings, self._clusters, self._site = settings, dict(clusters), set(site)
        self._links: dict[tuple[str, str], Link] = {}
        self.fastest_bits_per_s = SITE_BITS_PER_S
        """No link was ever faster."""
        self.least_threshold = 1
        """Tokens of a block: no loop moves a threshold below it, since only whole blocks ship."""
        self._held_for_all: int | None = None
        self._held: dict[tuple[str, str], int | None] = {}
        """Thresholds that the operator has set for single links; they outlive the links."""

    def between(self, source: str, destination: str) -> Link:
        """The link; down until it is reported up."""
        try:
            return self._links[source, destination]
        except KeyError:
            ends = self._clusters.get(source), self._clusters.get(destination)
            is_in_site = {source, destination} <= self._site
            is_in_site = is_in_site or (
                None not in ends and self.cluster_of(source) == self.cluster_of(destination)
            )
            cluster = None if is_in_site else ends[0] or ends[1]
            rate = SITE_BITS_PER_S if is_in_site else 0.0
            link = Link(source, destination, self._settings, cluster, rate, is_in_site=is_in_site)
            held = self._held.get((source, destination), self._held_for_all)
            if held is not None:
                link.hold(held)
            self._links[source, destination] = link
            return link

    def hold(self, offload_threshold: int | None, link: Link | None = None) -> None:
        """The operator sets the threshold of a link, or of all, also of those that come later.

        Args:
            offload_threshold: Tokens, above 0; no loop moves it. None ends that.
            link: None is all.
        """
        if link is None:
            self._held_for_all = offload_threshold
            self._held.clear()
        else:
            self._held[link.source, link.destination] = offload_threshold
        for each in self if link is None else (link,):
            each.hold(offload_threshold)

    def find(self, source: str, destination: str) -> Link | None:
        """The link; None if it was never named, so it is down."""
        return self._links.get((source, destination))

    def is_any_up(self, sources: Iterable[str], destination: str) -> bool:
        """Return True if a link to a pool is up."""
        ends = map(self._links.get, zip(sources, repeat(destination)))
        return any(link.up for link in ends if link is not None)

    def cluster_of(self, pool: str) -> str | None:
        """Name of the PrfaaS cluster that a pool belongs to; None if it is of none."""
        cluster = self._clusters.get(pool)
        return None if cluster is None else cluster.name

    def report(self, source: str, destination: str, report: LinkReport) -> None:
        """The pool node at the sending end of a link has read its counters."""
        book = self.between(source, destination).book
        book.report(report)
        self.fastest_bits_per_s = max(self.fastest_bits_per_s, book.bits_per_s)

    def know(self, pool: str, cluster: RemoteCluster | None) -> None:
        """A pool belongs to a PrfaaS cluster; None is the PD cluster."""
        if cluster is None:
            self._site.add(pool)
        else:
            self._clusters[pool] = cluster

    def forget(self, pool: str) -> None:
        """Forget a pool and its links; no open request uses them."""
        self._clusters.pop(pool, None)
        self._site.discard(pool)
        for ends in [ends for ends in self._links if pool in ends]:
            del self._links[ends]

    def bits_per_s_to(self, pools: Collection[str], now_ns: int) -> float | None:
        """Rate of all links to some pools from others; those that are down carry nothing; returns
        none if the rate of one is unknown, or none is up."""
        up = [
            link
            for link in self
            if link.up and link.destination in pools and link.source not in pools
        ]
        known = [state.bits_per_s for link in up if (state := link.book.latest(now_ns))]
        return sum(known) if known and len(known) == len(up) else None

    def __iter__(self) -> Iterator[Link]:
        return iter(self._links.values())

    def busiest(self, num_max: int, carried: Mapping[tuple[str, str], int]) -> list[Link]:
        """All links between two pools, or of more than `num_max` those that have carried most.

        Args:
            num_max: Links of the answer.
            carried: Bytes by the ends of a link; those that have carried nothing are left out where
                there are too many.
        """
        known = self._links
        if len(known) > num_max:
            ends = (each for each, num_bytes in carried.items() if num_bytes and each in known)
            return [known[each] for each in nlargest(num_max, ends, key=carried.__getitem__)]
        return [link for link in self if link.source]
