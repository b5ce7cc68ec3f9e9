"""The `[routing]` table of a deployment file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from prfaas.config.names import FilePathText
from prfaas.config.quantities import DurationNs, RateBitsPerS, Table, long_enough
from prfaas.core.kv.difference_limits import LIMITS
from prfaas.core.market.market import HYSTERESIS
from prfaas.core.request.fleet import PREFILL_TIMEOUT_NS
from prfaas.core.routing.policies import Bandwidth, PolicyName


class RoutingTable(Table):
    """`[routing]`: the routing of requests."""

    offload_threshold: int = Field(ge=0)
    """Incremental length, tokens, above which a prompt is prefilled in the PrfaaS cluster."""
    policy: Annotated[PolicyName, Field(strict=False)] | None = None
    """"local" never offloads, "remote" always does, "paper" compares with `offload_threshold`.

    "observed" does the same, but keeps a prompt local if observed TTFTs show that the local
    path is clearly faster. "adaptive" overrules the threshold if the other path is predicted to
    be clearly faster. "cost" selects the cluster of least cost in time, the PD cluster included;
    it needs a `plan` and a `second_price`. If absent: adaptive with a `plan`, else observed.
    """
    plan: FilePathText | None = None
    """Plan file of `prfaas plan` with the instances' profiles, for predictions.

    Its PrfaaS clusters are matched by name; a single one matches all. "adaptive" and "cost" need
    it.
    """
    short_term_loop: bool = False
    """Adjust the threshold of "adaptive" to queues and links instead of to the lengths of recent
    requests; needs a `plan`."""
    reroling: bool = False
    """Let PD engines change between prefill and decode by load; needs a `plan`, and engines with
    the role "prefill" or "decode". Enable it on only one of several gateways."""
    reroling_dwell: DurationNs = 300 * 10**9
    """Minimum time between two changes of roles.

    The loop's other times are proportional: the load has to require a change for two fifths of
    it.
    """
    replication: Annotated[RateBitsPerS, Field(ge=1_000_000)] | None = None
    """Mean rate of copies of hot prefixes on each link, such as "200Mbps".

    Prefixes that the PD cluster often misses are copied to it from a PrfaaS cluster. Needs a
    `plan`; no copies if absent.
    """
    replication_half_life: DurationNs = 60 * 10**9
    """Time in which the count of a missed prefix halves."""
    pull: bool = False
    """Let "adaptive" fetch a prefix from a PrfaaS cluster for a local prefill if that is predicted
    to be faster than computing it; needs a `plan`."""
    verify_one_in: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Compute one of this number of offloaded prompts again in the PD cluster, compare the received
    blocks, and bar a PrfaaS cluster's pool node if they are altered. Nothing is verified if absent.
    """
    verify_limits: dict[str, Annotated[float, Field(gt=0, le=1)]] = Field(default={})
    """Largest relative difference of honest blocks by type, such as `{ bfloat16 = 0.05 }`."""
    second_price: Annotated[float, Field(gt=0)] | None = None
    """Value of a second of a request's time, in the currency of the plan's `price_per_tb`. The
    price of shipped bytes then counts as time: for "adaptive", pulls, copies and the choice between
    PrfaaS clusters. If absent, bytes are free in decisions. Needs a `plan`."""
    price_file: FilePathText | None = None
    """File with tables `[prices.CLUSTER]` that take precedence over those here. The gateway reads
    it again when it changes."""
    price_hysteresis: Annotated[float, Field(ge=0, lt=1)] = HYSTERESIS
    """Share of its cost by which another cluster has to be cheaper than the one that the last
    prompt of about that length was sent to."""
    bandwidth: Annotated[Bandwidth, Field(strict=False)] = Bandwidth.SCARCE
    """Regime of the rule of "paper": "scarce" compares `offload_threshold` with the tokens missing
    from the PD pool, "abundant" with those missing from both pools, and fetches a longer prefix of
    the PrfaaS pool for a prompt below it; "abundant" needs a `plan`."""
    ttft_max: DurationNs | None = None
    """Refuse with 429 requests that are predicted to take longer to their first token; needs a
    `plan`, and predictions that are proven by observed TTFTs."""
    prefill_timeout: DurationNs = PREFILL_TIMEOUT_NS
    """Time limit of a remote prefill; then the prompt is prefilled where that is soonest. A queue
    that moves is waited for if nothing else is sooner."""
    transfer_timeout: DurationNs = 10 * 10**9
    """Time limit of decode for blocks after the end of the prefill leg, and of a local prefill for
    a pulled prefix."""

    early_first_token: Literal["auto", "off"] = "auto"  # noqa: S105 (no password)
    """Stream the first token from the engine that prefills, before its blocks arrive, to requests
    whose answer cannot change by that."""
    relay_decode: Literal["auto", "always", "off"] = "auto"
    """Let the engine that prefills go on until its blocks have come over a slow link: auto (but no
    greedy answers), always, or off."""
    state_checkpoints: Annotated[int, Field(ge=0, le=2**30)] | Literal["auto"] = 0
    """Least distance, tokens, of intermediate states of linear layers that a hand-off ships beside
    the last one, if the link has room: after a broken transfer decode resumes at the last that
    arrived. 0 ships none. A number is raised where the states would more than double the bytes of
    a hand-off. "auto" chooses by the size of a state against the cost of recompute, adds at most
    10 % to the bytes, and needs a `plan`. vLLM keeps the last state of a prompt alone: give the
    PrfaaS engines `--prefix-cache-retention-interval`, a multiple of their block size. Upgrade all
    engines before you set it (`docs/decisions/0033-later-states.md`)."""

    _limits = field_validator(
        "ttft_max", "prefill_timeout", "transfer_timeout", "reroling_dwell", "replication_half_life"
    )(long_enough)

    @model_validator(mode="after")
    def _can_predict(self) -> RoutingTable:
        if self.ttft_max is not None and self.plan is None:
            raise ValueError("ttft_max needs a plan: without profiles nothing is predicted")
        if self.policy is PolicyName.ADAPTIVE and self.plan is None:
            raise ValueError(
                'policy = "adaptive" needs a plan: without profiles nothing is predicted; name one '
                'with plan = "FILE", or say policy = "paper"'
            )
        if self.policy is PolicyName.COST and (self.plan is None or self.second_price is None):
            raise ValueError(
                'policy = "cost" needs a plan, which has times, bytes and GPUs, and second_price, '
                "the value of a second of a request's time"
            )
        if self.price_file is not None and self.plan is None:
            raise ValueError("price_file needs a plan: it has the times and bytes of prompts")
        if self.short_term_loop and self.plan is None:
            raise ValueError(
                "short_term_loop needs a plan: it moves the threshold of adaptive routing, which "
                "predicts from one; without it the threshold stays"
            )
        if self.replication is not None and self.plan is None:
            raise ValueError("replication needs a plan: it weighs prefill time against bytes")
        if self.pull and self.effective_policy is not PolicyName.ADAPTIVE:
            raise ValueError(
                'pull needs a plan and policy = "adaptive": it weighs prefill time against bytes'
            )
        if self.second_price is not None and self.plan is None:
            raise ValueError("second_price needs a plan: it has the price of bytes on each link")
        is_paper = self.effective_policy is PolicyName.PAPER
        if self.bandwidth is Bandwidth.ABUNDANT and not (is_paper and self.plan):
            raise ValueError(
                'bandwidth = "abundant" needs a plan and policy = "paper", whose rule it is'
            )
        if self.verify_limits and self.verify_one_in is None:
            raise ValueError("verify_limits need verify_one_in: without it nothing is verified")
        for dtype in self.verify_limits.keys() - LIMITS.keys():
            raise ValueError(
                f"verify_limits.{dtype}: blocks of this type are not judged; limits are for "
                f"{', '.join(LIMITS)}"
            )
        if self.reroling and self.plan is None:
            raise ValueError("reroling needs a plan: it weighs the splits that the plan knows")
        return self

    @model_validator(mode="after")
    def _can_space(self) -> RoutingTable:
        if self.state_checkpoints == "auto" and self.plan is None:
            raise ValueError(
                'state_checkpoints = "auto" needs a plan: it weighs prefill time against bytes; '
                "or set a number of tokens"
            )
        return self

    @property
    def effective_policy(self) -> PolicyName:
        """`policy`, or what stands in for it."""
        if self.policy is not None:
            return self.policy
        return PolicyName.OBSERVED if self.plan is None else PolicyName.ADAPTIVE
