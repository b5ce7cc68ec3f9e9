"""Profiles of a gateway, from the operator's plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from prfaas.config.clusters import ClusterRole, ClusterTable
from prfaas.config.deployment import Deployment
from prfaas.core.routing.predictions import Costs
from prfaas.errors import ConfigError
from prfaas.gateway.routing.dispatcher_setup import Profiles
from prfaas.market.make import planned_site

if TYPE_CHECKING:
    from prfaas.planner.answer.plan_loader import Question
    from prfaas.planner.problem import PrfaasCluster


def load_profiles(deployment: Deployment) -> Profiles:
    """Read the plan that a deployment names.

    Raises:
        ConfigError: The plan is wrong, or does not know a PrfaaS cluster of the deployment.
    """
    plan, slots = deployment.routing.plan, _timing_slots(deployment)
    if plan is None:
        attention = _attention_tokens(Path(deployment.model.path))
        return Profiles(engine_slots=slots, attention_tokens=attention)
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
        engine_slots=slots,
    )


def _timing_slots(deployment: Deployment) -> dict[str, int]:
    """Sequences that each timing engine runs at once, by its plan."""
    slots = dict[str, int]()
    for table in deployment.clusters.values():
        if table.timing is not None:
            from prfaas.planner.answer.plan_loader import load_question

            decode_slots = load_question(table.timing.plan).problem.decode_slots
            slots |= dict.fromkeys(table.engines, decode_slots)
    return {name: number for name, number in slots.items() if number}


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
