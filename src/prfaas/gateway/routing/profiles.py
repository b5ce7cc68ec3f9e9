"""Profiles of the clusters from the operator's plan, for predictions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from prfaas.config.clusters import ClusterRole, ClusterTable
from prfaas.config.deployment import Deployment
from prfaas.core.control.split import Plans
from prfaas.core.routing.predictions import CostModel, Costs
from prfaas.errors import ConfigError
from prfaas.market.make import PlannedSite, planned_site

if TYPE_CHECKING:
    from prfaas.planner.answer.plan_loader import Question
    from prfaas.planner.problem import PrfaasCluster


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
        num_home: PD instances of the plan.
        plans: The best threshold for every split of the PD instances.
        sites: GPUs, prices and round trips of all clusters by name.
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
    attention_tokens: int = 0


def load_profiles(deployment: Deployment) -> Profiles:
    """Read the plan that a deployment names.

    Raises:
        ConfigError: The plan is wrong, or does not know a PrfaaS cluster of the deployment.
    """
    plan = deployment.routing.plan
    if plan is None:
        return Profiles(attention_tokens=_attention_tokens(Path(deployment.model.path)))
    # The planner brings scipy: half a second and a third of the memory of a gateway without a plan.
    from prfaas.planner.answer.plan_loader import load_question
    from prfaas.planner.solve.designs import split_plans

    question = load_question(plan)
    remotes = deployment.clusters_of(ClusterRole.PRFAAS)
    found = {name: question.prfaas_cluster(name, plan) for name in remotes}
    pd, local = next(iter(deployment.clusters_of(ClusterRole.PD).items()))
    remote = {
        name: _as_run(_costs(question, cluster), local, remotes[name])
        for name, cluster in found.items()
    }
    return Profiles(
        local=next(iter(remote.values()), None) or _as_run(_costs(question, None), local, local),
        remote=remote,
        link_bits_per_s={name: cluster.goodput_bits_per_s for name, cluster in found.items()},
        price_per_tb={name: cluster.link.price_per_tb for name, cluster in found.items()},
        decode_slots=question.problem.decode_slots,
        num_local=question.problem.pd.num_instances,
        plans=split_plans(question.problem),
        sites={
            pd: planned_site(question.problem.pd),
            **{name: planned_site(cluster) for name, cluster in found.items()},
        },
    )


def _attention_tokens(model: Path) -> int:
    """`attention_tokens` of a checkpoint directory; 0 if its config cannot be read."""
    from prfaas.planner.hardware.roofline import attention_tokens_of

    try:
        config = json.loads((model / "config.json").read_bytes())
        return attention_tokens_of(config, str(model)) if isinstance(config, dict) else 0
    except (OSError, ValueError, RecursionError, ConfigError):
        return 0


def _as_run(costs: Costs, local: ClusterTable, remotes: ClusterTable) -> Costs:
    """Costs of timing engines that run faster than the plan, or with smaller blocks."""
    (here, sizes), (there, _) = _scales(local), _scales(remotes)
    return replace(
        costs,
        local_ns=_scaled(costs.local_ns, here),
        remote_ns=_scaled(costs.remote_ns, there),
        local_resume_ns=_scaled(costs.local_resume_ns, here),
        remote_resume_ns=_scaled(costs.remote_resume_ns, there),
        bytes_of=_scaled(costs.bytes_of, sizes),
        state_bytes=round(costs.state_bytes * sizes),
    )


def _scales(cluster: ClusterTable) -> tuple[float, float]:
    """Factors of time and of bytes; those of engines that are started elsewhere are not known."""
    timing = cluster.timing
    if timing is None or all(engine.url for engine in cluster.engines.values()):
        return 1.0, 1.0
    return timing.time_scale, timing.bytes_scale


def _scaled(table: Sequence[int], factor: float) -> list[int]:
    return list(table) if factor == 1.0 else [round(value * factor) for value in table]


def _costs(question: Question, remotes: PrfaasCluster | None) -> Costs:
    from prfaas.planner.hardware.profiles import make_costs

    problem = question.problem
    profiles = [problem.pd.prefill, remotes.prefill if remotes else problem.pd.prefill]
    longest = max(profile.lengths[-1] for profile in profiles)
    return make_costs(
        problem.geometry,
        *profiles,
        num_tokens_max=int(longest) + 1,
        chunk_tokens=question.chunk_tokens,
        overlap=True,
    )
