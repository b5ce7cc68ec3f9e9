"""Single figures of a plan, for every kind of output."""

from __future__ import annotations

from prfaas.planner import formatting as w
from prfaas.planner.answer.plan import Latencies, Plan
from prfaas.planner.sizing.obstacles import fleet_in_words


def facts(plan: Plan) -> list[tuple[str, str]]:
    """Single figures of the plan: name and value in words."""
    found = plan.exact.prfaas.operation
    return [
        *_sizes(plan),
        ("offloaded", f"{w.percent(found.offload_fraction)} of requests"),
        ("mean length offloaded / local", f"{found.mean_long:,.0f} / {found.mean_short:,.0f}"),
        ("pays above a bandwidth of", w.bandwidth(plan.break_even_bits_per_s)),
        ("fetching beats recomputing above", w.bandwidth(plan.recompute_bits_per_s)),
        (
            "break-even price of 1 TB",
            plan.break_even_price.reason or w.price(plan.break_even_price.per_tb),
        ),
    ]


def _sizes(plan: Plan) -> list[tuple[str, str]]:
    if plan.sizing is None:
        return []
    problem, sizing = plan.question.problem, plan.sizing
    name = f"cheapest for {sizing.demand_per_s:,.6g} req/s"
    return [
        (what, "none" if fleet is None else fleet_in_words(problem, fleet))
        for what, fleet in (
            (name, sizing.cheapest),
            ("without PrfaaS instances", sizing.homogeneous),
        )
    ]


def overloads(times: Latencies) -> str:
    """Stages that cannot carry the load of the latencies, as the end of a sentence; or ""."""
    return "".join(
        f"; inf: {stage.value} of {name} is overloaded" for name, stage in times.overloaded.items()
    )
