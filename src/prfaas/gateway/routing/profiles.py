"""Profiles of the clusters for predictions, as they are read from the operator's plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prfaas.core.control.split import Plans
from prfaas.core.market.choice import PlannedSite
from prfaas.core.market.market import Market
from prfaas.core.routing.predictions import CostModel


@dataclass(frozen=True, slots=True)
class Profiles:
    """Costs by cluster; empty without a plan.

    Attributes:
        local: Profile of the PD cluster.
        remote: Of PrfaaS clusters by name.
        link_bits_per_s: What the plan expects of their links, by name; stands in for a rate that
            was not measured yet.
        price_per_tb: Of 10**12 bytes on their links, by name.
        decode_slots: Requests that a PD instance decodes at a time; 0 is unknown.
        plans: The best threshold for every split of the PD instances.
        sites: GPUs, prices and round trips of all clusters by name.
        market: Prices; None without.
        engine_slots: Sequences that a timing engine runs at once, by name.
        attention_tokens: Without a plan: context at which attention costs a token of the model as
            much as all else; 0 is unknown.
    """

    local: CostModel | None = None
    remote: Mapping[str, CostModel] = field(default_factory=dict)
    link_bits_per_s: Mapping[str, float] = field(default_factory=dict)
    price_per_tb: Mapping[str, float] = field(default_factory=dict)
    decode_slots: int = 0
    num_local: int = 0
    plans: Plans | None = None
    sites: Mapping[str, PlannedSite] = field(default_factory=dict)
    market: Market | None = None
    engine_slots: Mapping[str, int] = field(default_factory=dict)
    attention_tokens: int = 0


NO_PLAN = Profiles()
