"""The table of a deployment file that says who prefills what."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator, model_validator

from prfaas.config.names import FilePathText
from prfaas.config.quantities import DurationNs, RateBitsPerS, long_enough
from prfaas.config.table import Table
from prfaas.core.routing.policies import Bandwidth, PolicyName


class RoutingTable(Table):
    """`[routing]`: who prefills what."""

    offload_threshold: int = Field(ge=0)
    """Incremental length, tokens, above which a prompt is prefilled in the PrfaaS cluster."""
    policy: Annotated[PolicyName, Field(strict=False)] | None = None
    """"local" never offloads, "remote" always does, "paper" compares with `offload_threshold`,
    "observed" does that and keeps a prompt at home where observed first tokens come clearly sooner
    there, "adaptive" overrules the threshold where the other path is predicted to be clearly
    faster. Without it: adaptive if there is a `plan` to predict from, else observed."""
    plan: FilePathText | None = None
    """Plan file of `prfaas plan` with the instances' profiles, from which paths are predicted; its
    PrfaaS clusters are found by name, a single one stands for all. "adaptive" needs it."""
    short_term_loop: bool = False
    """Let the threshold of "adaptive" follow queues and links; needs a `plan`."""
    reroling: bool = False
    """Let PD engines change between prefill and decode as the load asks for; needs a `plan`, and
    engines with the role "prefill" or "decode". Of several gateways one may do so."""
    reroling_dwell: DurationNs = 300 * 10**9
    """From the end of one change of roles to the next, at least. The loop's other times are in
    proportion: a load has to ask for a change for two fifths of it."""
    replication: Annotated[RateBitsPerS, Field(ge=1_000_000)] | None = None
    """What copies of hot prefixes may take of each link on average, such as "200Mbps": what home
    misses again and again and a PrfaaS cluster holds is copied home. Needs a `plan`; without
    this nothing is copied."""
    pull: bool = False
    """Let "adaptive" fetch a prefix that a PrfaaS cluster holds, for a prompt that is prefilled at
    home, when that is predicted to be faster than computing it; needs a `plan`."""
    second_price: Annotated[float, Field(gt=0)] | None = None
    """Value of a second of a request's time, in the currency of the plan's `price_per_tb`. The
    price of shipped bytes then counts as time: for "adaptive", pulls, copies and the choice between
    PrfaaS clusters. Without it bytes are free in decisions. Needs a `plan`."""
    bandwidth: Annotated[Bandwidth, Field(strict=False)] = Bandwidth.SCARCE
    """Regime of the rule of "paper": "scarce" compares `offload_threshold` with what the PD pool
    lacks, "abundant" with what both pools lack, and fetches a longer prefix of the PrfaaS pool for
    a prompt below it; "abundant" needs a `plan`."""
    ttft_max: DurationNs | None = None
    """Refuse with 429 what is predicted to take longer to its first token; needs a `plan`, and
    predictions that first tokens of streams have proven."""
    prefill_timeout: DurationNs = 60 * 10**9
    """A remote prefill that takes longer is given up; the prompt is prefilled locally."""
    transfer_timeout: DurationNs = 10 * 10**9
    """How long decode waits for blocks after the prefill leg has answered, and a prefill at home
    for a pulled prefix."""

    _limits = field_validator("ttft_max", "prefill_timeout", "transfer_timeout", "reroling_dwell")(
        long_enough
    )

    @model_validator(mode="after")
    def _can_predict(self) -> RoutingTable:
        if self.ttft_max is not None and self.plan is None:
            raise ValueError("ttft_max needs a plan: without profiles nothing is predicted")
        if self.policy is PolicyName.ADAPTIVE and self.plan is None:
            raise ValueError(
                'policy = "adaptive" needs a plan: without profiles nothing is predicted; name one '
                'with plan = "FILE", or say policy = "paper"'
            )
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
        if self.reroling and self.plan is None:
            raise ValueError("reroling needs a plan: it weighs the splits that the plan knows")
        return self

    @property
    def effective_policy(self) -> PolicyName:
        """`policy`, or what stands in for it."""
        if self.policy is not None:
            return self.policy
        return PolicyName.OBSERVED if self.plan is None else PolicyName.ADAPTIVE
