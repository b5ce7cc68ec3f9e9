"""Routing decisions and their reasons."""

from __future__ import annotations

from enum import StrEnum

from prfaas.core.market.choice import OfferChoice
from prfaas.records import Record
from prfaas.units import format_seconds


class Path(StrEnum):
    """Path of a request: the place of its prefill."""

    LOCAL = "local"
    REMOTE = "remote"


_REMOTE = Path.REMOTE
"""A name of a module costs a third of a member's."""


class Reason(StrEnum):
    """Reason of a routing decision; bounded, so that it can label a metric."""

    ABOVE_THRESHOLD = "above_threshold"
    BELOW_THRESHOLD = "below_threshold"
    LINK_DOWN = "link_down"
    """The sending pool node reports no connection to the receiving one."""
    LINK_BARRED = "link_barred"
    """The link's breaker is open: transfers over it failed."""
    POOL_DRAINING = "pool_draining"
    """A pool node takes no new transfers: it stops, or an operator has it drained."""
    POOL_NOT_CONNECTED = "pool_not_connected"
    """The gateway has no connection to a pool node."""
    ENGINE_NOT_CONNECTED = "engine_not_connected"
    """A ready engine has announced no KV layout: its pool node does not know it."""
    NO_PREFILL_INSTANCE = "no_prefill_instance"
    PROMPT_TOO_LONG = "prompt_too_long"
    """It exceeds the model length of every ready PrfaaS engine."""
    LAYOUT_MISMATCH = "layout_mismatch"
    SHARED_CORES = "shared_cores"
    """The PrfaaS engine has no cores that the PD engine lacks (`observed`)."""
    NOT_OFFLOADABLE = "not_offloadable"
    """The request needs a single engine, for instance for prompt logprobs."""
    NOTHING_TO_SHIP = "nothing_to_ship"
    """No KV block of the prompt is missing from the PD cluster."""
    REGION = "region"
    """Its tenant may not be in a region of the PrfaaS cluster."""
    LINK_LIMIT = "link_limit"
    """Its tenant has used its share of the links."""
    NO_ROOM = "no_room"
    """Its blocks do not fit into the PD cluster's pool, beside those in transit."""
    LINK_FULL = "link_full"
    """The link could not carry it in time behind what it was promised already."""
    ALWAYS_LOCAL = "always_local"
    ALWAYS_REMOTE = "always_remote"
    FASTER_LOCAL = "faster_local"
    """Above the threshold, but the local path is predicted to be clearly faster."""
    TRIED_LOCAL = "tried_local"
    """Above the threshold, but tried locally to observe the time of such a length (`observed`)."""
    FASTER_REMOTE = "faster_remote"
    """Below the threshold, but the remote path is predicted to be clearly faster."""
    NO_LOCAL_INSTANCE = "no_local_instance"
    """No PD engine that prefills is ready: the PrfaaS cluster alone can."""
    CHEAPEST_REMOTE = "cheapest_remote"
    """A PrfaaS cluster costs least of those that are in time (`cost`)."""
    CHEAPEST_LOCAL = "cheapest_local"
    """The PD cluster costs least of those that are in time (`cost`)."""
    LEAST_LATE = "least_late"
    """Every cluster that could serve it is late, this one least (`cost`)."""
    NONE_FEASIBLE = "none_feasible"
    """No PrfaaS cluster is predicted to be in time and to stay (`cost`)."""


class Unpredicted(StrEnum):
    """Reason for a missing prediction."""

    NO_PROFILE = "no profile of the instances"
    STALE_SIGNALS = "no fresh signal of queues or link"


_WORDS = {
    Reason.ABOVE_THRESHOLD: "long: {compared}",
    Reason.BELOW_THRESHOLD: "short: {compared}",
    Reason.LINK_DOWN: "long ({compared}), but the link is down",
    Reason.LINK_BARRED: "long ({compared}), but transfers over the link failed, and it is barred",
    Reason.POOL_DRAINING: "long ({compared}), but a pool node takes no new transfers",
    Reason.POOL_NOT_CONNECTED: "long ({compared}), but a pool node does not answer the gateway",
    Reason.ENGINE_NOT_CONNECTED: "long ({compared}), but an engine is not connected to its pool "
    "node",
    Reason.NO_PREFILL_INSTANCE: "long ({compared}), but no PrfaaS engine is ready",
    Reason.PROMPT_TOO_LONG: "long ({compared}), and longer than any ready PrfaaS engine takes",
    Reason.LAYOUT_MISMATCH: "long ({compared}), but the clusters' KV layouts differ",
    Reason.SHARED_CORES: "long ({compared}), but the PrfaaS engine would compute it on the "
    "cores of the PD engine",
    Reason.NOT_OFFLOADABLE: "long ({compared}), but with a field that one engine alone can serve",
    Reason.NOTHING_TO_SHIP: "long ({compared}), but less than a new KV block to ship",
    Reason.REGION: "long ({compared}), but its tenant may not be in a region of the PrfaaS cluster",
    Reason.LINK_LIMIT: "long ({compared}), but its tenant has used its share of the links",
    Reason.NO_ROOM: "long ({compared}), but its KV blocks do not fit into the PD pool with those "
    "in transit",
    Reason.LINK_FULL: "long ({compared}), but the link has more to carry than it can in time",
    Reason.ALWAYS_LOCAL: "the policy prefills every request locally ({compared})",
    Reason.ALWAYS_REMOTE: "the policy offloads every request ({compared})",
    Reason.FASTER_LOCAL: "long ({compared}), but predicted faster locally{predictions}",
    Reason.TRIED_LOCAL: "long ({compared}), but tried locally, to see how long that takes",
    Reason.FASTER_REMOTE: "short ({compared}), but predicted faster remotely{predictions}",
    Reason.NO_LOCAL_INSTANCE: "{compared}: no PD engine that prefills is ready",
    Reason.CHEAPEST_REMOTE: "the least cost for {new}",
    Reason.CHEAPEST_LOCAL: "the least cost for {new}",
    Reason.LEAST_LATE: "late wherever it goes, here least, for {new}",
    Reason.NONE_FEASIBLE: "no PrfaaS cluster is in time and stays for {new}",
}


class RoutingFacts(Record, frozen=True):
    """Inputs of a decision at the arrival of a request. Lengths in tokens."""

    num_prompt_tokens: int
    pd_hit_tokens: int = 0
    """Usable cached prefix in the PD cluster, for the instance that would prefill."""
    prfaas_hit_tokens: int = 0
    obstacle: Reason | None = None
    """What keeps the request from being prefilled remotely; None when nothing does."""
    device_only_tokens: int = 0
    """End of `pd_hit_tokens` that is not in the pool of the instance that decodes: it lies in the
    memory of the one that prefills, or on its host. Negative if that pool has more."""
    remote_device_only_tokens: int = 0
    """The same of `prfaas_hit_tokens`."""

    @property
    def num_new_tokens(self) -> int:
        """Incremental length, judged by the PD cluster's own cache."""
        return self.num_prompt_tokens - self.pd_hit_tokens

    @property
    def present_tokens(self) -> int:
        """Cached prefix in the pool of the instance that decodes: it is not shipped."""
        return self.pd_hit_tokens - self.device_only_tokens

    @property
    def pullable_tokens(self) -> int:
        """Cached prefix in the PrfaaS cluster's pool: what lies there can be fetched."""
        return self.prfaas_hit_tokens - self.remote_device_only_tokens


class Decision(Record, frozen=True):
    """A decision: the path and its reason."""

    path: Path
    reason: Reason
    """Reason, as a label."""
    num_new_tokens: int
    """Incremental length of the rule, tokens."""
    offload_threshold: int
    """The threshold it was compared with, tokens."""
    predicted_local_ns: int | None = None
    """Predicted time to first token of the local path; None if unknown."""
    predicted_remote_ns: int | None = None
    pull_tokens: int = 0
    """Prefix that the other cluster holds and this path takes from it, tokens."""
    unpredicted: Unpredicted | None = None
    """Reason why there are no predictions; None where there are, or where none are asked."""
    detail: str = ""
    """What of the reason is known beside; "" is nothing."""
    choice: OfferChoice | None = None
    """Costs of all clusters; None unless the policy is `cost`."""

    @property
    def explanation(self) -> str:
        """The reason as text for people."""
        compared = f"{self.num_new_tokens:,} new tokens against {self.offload_threshold:,}"
        new = f"{self.num_new_tokens:,} new tokens"
        words = _WORDS[self.reason].format(
            compared=compared, new=new, predictions=self._predictions
        )
        if self.detail:
            words += f": {self.detail}"
        if self.pull_tokens:
            words += f"; pulls the {self.pull_tokens:,} tokens more that the PrfaaS cluster holds"
        return f"{words}; not predicted: {self.unpredicted.value}" if self.unpredicted else words

    @property
    def predicted_ns(self) -> int | None:
        """Predicted time to first token of the path that was taken; None if unknown."""
        return self.predicted_remote_ns if self.path is _REMOTE else self.predicted_local_ns

    @property
    def _predictions(self) -> str:
        if self.predicted_local_ns is None or self.predicted_remote_ns is None:
            return ""
        local, remote = map(format_seconds, (self.predicted_local_ns, self.predicted_remote_ns))
        return f": {local} local, {remote} remote"


def judge(facts: RoutingFacts, num_new_tokens: int, offload_threshold: int) -> tuple[Path, Reason]:
    """The paper's rule: a length against a threshold, both tokens, and what stands in the way.

    References:
        arXiv:2604.15039, section on routing: `l_total - l_pd <= t → PD-P, else PrfaaS`.
    """
    if num_new_tokens <= offload_threshold:
        return Path.LOCAL, Reason.BELOW_THRESHOLD
    if facts.obstacle is not None:
        return Path.LOCAL, facts.obstacle
    return Path.REMOTE, Reason.ABOVE_THRESHOLD
