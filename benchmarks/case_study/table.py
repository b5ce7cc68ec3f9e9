"""The outcome as Markdown."""

import os
from dataclasses import dataclass

from .designs import Design, Window
from .live import Live, Scale
from .outcome import Outcome, figures

NUM_CORES = os.cpu_count() or 1


@dataclass(frozen=True)
class Case:
    """A design, simulated and live."""

    design: Design
    simulated: list[Outcome]
    live: Live


def tables(cases: list[Case], spans: list[Window], scale: Scale) -> str:
    """All tables."""
    return "\n\n".join(
        [_sustained(cases, spans[-1]), _by_load(cases, spans), _machine(cases, scale)]
    )


def _sustained(cases: list[Case], last: Window) -> str:
    """Rate that each design sustains, and ratios to ours."""
    rows = {
        case.design.key: (
            case.design.printed,
            case.design.planned,
            figures(case.simulated, last).per_s,
            figures(case.live.outcomes, last).per_s,
        )
        for case in cases
    }
    lines = [
        "| design | prefill + decode | paper | planner | simulator | live |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for case in cases:
        design, found = case.design, rows[case.design.key]
        split = f"{design.num_prfaas} + {design.num_prefill} : {design.num_decode}"
        cells = " | ".join(f"{value:.2f}" for value in found)
        lines.append(f"| {design.name}, req/s | {split} | {cells} |")
    for key in ("homogeneous", "naive"):
        if key in rows and "ours" in rows:
            pairs = zip(rows["ours"], rows[key], strict=True)
            ratios = " | ".join(f"{ours / other:.2f}x" for ours, other in pairs)
            lines.append(f"| PrfaaS-PD / {key} | | {ratios} |")
    return "\n".join(lines)


def _by_load(cases: list[Case], spans: list[Window]) -> str:
    """Simulator and live at every load."""
    lines = [
        "| design | load | offered | req/s: simulator | live | differ "
        "| mean TTFT s: simulator | live | differ | P90 TTFT s: simulator | live |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case in cases:
        for span in spans:
            model, live = figures(case.simulated, span), figures(case.live.outcomes, span)
            cells = [
                case.design.name,
                f"{span.load:.2f}",
                f"{span.load * case.design.planned:.2f}",
                f"{model.per_s:.2f}",
                f"{live.per_s:.2f}",
                f"{live.per_s / model.per_s - 1:+.1%}",
                f"{model.ttft:.2f}",
                f"{live.ttft:.2f}",
                f"{live.ttft / model.ttft - 1:+.1%}",
                f"{model.p90:.2f}",
                f"{live.p90:.2f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _machine(cases: list[Case], scale: Scale) -> str:
    """Figures that show if the machine was the bottleneck."""
    lines = [
        "| design | requests | errors | offloaded: simulator | live | egress, Mbit/s "
        "| engines behind at most, ms | cores: this run | all |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case in cases:
        outcomes = case.live.outcomes
        seconds = max(o.arrived for o in outcomes) * scale.time
        cells = [
            case.design.name,
            str(len(outcomes)),
            str(sum(bool(o.error) for o in outcomes)),
            f"{_offloaded(case.simulated):.1%}",
            f"{_offloaded(outcomes):.1%}",
            f"{case.live.link_bytes * 8 / seconds / 1e6:.0f}",
            f"{case.live.behind_s * 1e3:.0f}",
            f"{case.live.cores:.2f}",
            f"{case.live.busy_ratio * NUM_CORES:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    errors = {o.error for case in cases for o in case.live.outcomes if o.error}
    return "\n".join(lines + [f"\nerror: {error}" for error in sorted(errors)])


def _offloaded(outcomes: list[Outcome]) -> float:
    began = [o for o in outcomes if o.first is not None]
    return sum(o.offloaded for o in began) / max(len(began), 1)
