"""Deployment settings of a plan: what `prfaas up` takes."""

from __future__ import annotations

from prfaas.planner.answer.plan import Plan, no_offload


def deployment_settings(plan: Plan) -> str:
    """A TOML fragment with the threshold, and the roles of all instances as comments.

    The threshold is the one of the exact mode. A plan that offloads nothing emits a threshold
    that no prompt of the workload exceeds.
    """
    problem, found = plan.question.problem, plan.exact.prfaas.operation
    threshold = found.offload_threshold or problem.workload.lengths.high
    lines = [
        f"# {problem.title}",
        f"# {plan.verdict.sentence}",
        "#",
        "# cluster                         role      instances",
    ]
    lines += [f"# {c.name:<31} prefill   {c.num_instances:>9}" for c in problem.prfaas]
    lines += [
        f"# {problem.pd.name:<31} prefill   {found.num_prefill:>9}",
        f"# {problem.pd.name:<31} decode    {found.num_decode:>9}",
    ]
    if no_offload(found):
        lines.append("# Nothing is offloaded: no prompt is longer than the threshold.")
    lines += ["", "[routing]", f"offload_threshold = {round(threshold)}", ""]
    return "\n".join(lines)
