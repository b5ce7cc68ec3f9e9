"""The plan as tables and plots; the HTML report is the same, wider."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import isfinite

import numpy as np
import numpy.typing as npt
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from prfaas import units as w
from prfaas.core.codec.codecs import LinkCodec
from prfaas.core.request.relay import STEPS_MIN
from prfaas.planner.answer.coding import CodingSide, LinkEffect
from prfaas.planner.answer.plan import Comparison, Plan
from prfaas.planner.answer.verdict import VerdictAnswer
from prfaas.planner.hardware.profiles import step_time
from prfaas.planner.model.kv_geometry import FloatArray
from prfaas.planner.sizing.obstacles import fleet_in_words
from prfaas.planner.solve.search import Curve, against_split, against_threshold
from prfaas.presentation import Line, plain_table, plot
from prfaas.units import NS_PER_S, format_size


def designs_tables(plan: Plan, *, wide: bool = False) -> list[Table]:
    """Designs in both modes; the price of an hour only if wide."""
    return [
        _designs("Exact expectations E[T(L)]", plan.exact, wide=wide),
        _designs("The paper's representative lengths T(E[L])", plan.paper, wide=wide),
    ]


def _designs(title: str, comparison: Comparison, *, wide: bool) -> Table:
    rates = [design.operation.rate_per_s for design in comparison.all]
    gain = w.percent(comparison.gain, signed=True) if any(rates) else "nothing is carried"
    columns = ["design", "GPUs", "t", "instances", "Λ/s", "egress", "per Mtok"]
    table = plain_table(
        f"{title}: {gain} at equal cost", *columns, *(["price / h"] if wide else [])
    )
    table.caption = "t in tokens; instances of PrfaaS/PD-P/PD-D; price of 1 M prompt tokens"
    for design in comparison.all:
        found = design.operation
        row = (
            design.name,
            w.gpus(design.num_gpus),
            w.tokens(found.whole_threshold),
            f"{found.num_prfaas}/{found.num_prefill}/{found.num_decode}",
            w.rate(found.rate_per_s),
            w.bandwidth(found.egress_bits_per_s) if found.egress_bits_per_s else "-",
            w.price(design.price_per_mtoken),
        )
        table.add_row(*row, *([w.price(design.price_per_h)] if wide else []))
    return table


def coding_tables(plan: Plan) -> list[Table]:
    """Effect of coding the links, and of every class, as far as they were asked for."""
    found = []
    if (effect := plan.coding) is not None:
        raw, coded = effect.raw, effect.coded
        table = plain_table(
            f"Coding of links, {effect.quality}, exact", "", "raw", "coded", "change"
        )
        table.caption = "; ".join(f"{link.cluster}: {_link(link)}" for link in effect.links)
        table.add_row("verdict", raw.answer.value, coded.answer.value, "")
        gains = (w.percent(side.gain, signed=True) for side in (raw, coded))
        table.add_row("gain at equal cost", *gains, "")
        for name, shown, value in _SIDE:
            table.add_row(name, *_compared(shown, value(raw), value(coded)))
        found.append(table)
    if plan.classes:
        found.append(_classes(plan.classes))
    return found


def _size(num_bytes: float) -> str:
    return format_size(round(num_bytes))


_SIDE: tuple[tuple[str, Callable[[float], str], Callable[[CodingSide], float | None]], ...] = (
    ("t, tokens", w.tokens, lambda side: side.offload_threshold),
    ("Λ, req/s", w.rate, lambda side: side.rate_per_s),
    ("egress", w.bandwidth, lambda side: side.egress_bits_per_s),
    ("bytes of an offload", _size, lambda side: side.offloaded_bytes),
    ("traffic per hour", w.price, lambda side: side.traffic_price_per_h),
    ("per Mtok", w.price, lambda side: side.price_per_mtoken),
)
"""Figures of coded or raw links: name, form, value."""


def _classes(classes: Mapping[str, CodingSide]) -> Table:
    columns = ("class", "verdict", "gain", "t", "Λ/s", "egress", "an offload", "traffic/h")
    table = plain_table("Classes of the links, exact, at this bandwidth", *columns, "per Mtok")
    for name, side in classes.items():
        figures = (_shown(value(side), shown) for _, shown, value in _SIDE)
        table.add_row(name, side.answer.value, w.percent(side.gain, signed=True), *figures)
    return table


def _link(link: LinkEffect) -> str:
    """Coding of a link, or the reason that there is none."""
    if link.is_coding:
        if link.hand_off_ratio == 1:
            return "codes, but no cache of this model is bfloat16: all is sent raw"
        return f"codes {link.ratio:.2f}:1, the whole hand-off {link.hand_off_ratio:.2f}:1"
    if link.codec is LinkCodec.RAW:
        return "raw"
    return f"raw, since coded blocks would be carried at {link.gain:.2f} of the rate"


def _compared(
    shown: Callable[[float], str], raw: float | None, coded: float | None
) -> tuple[str, str, str]:
    change = ""
    if raw is not None and coded is not None and raw > 0 and isfinite(raw) and isfinite(coded):
        change = w.percent(coded / raw - 1, signed=True)
    return _shown(raw, shown), _shown(coded, shown), change


def _shown(value: float | None, shown: Callable[[float], str]) -> str:
    return "-" if value is None else shown(value)


def throughputs_table(plan: Plan) -> Table:
    """Rates of the stages of each design, in both modes."""
    table = plain_table(
        "Stage throughputs Θ, req/s",
        "design", "exact\nprfaas", "\npd-p", "\npd-d", "paper's\nprfaas", "\npd-p", "\npd-d",
    )  # fmt: skip
    for exact, paper in zip(plan.exact.all, plan.paper.all, strict=True):
        both = (exact.operation, paper.operation)
        rates = [r for o in both for r in (o.prfaas_per_s, o.pd_prefill_per_s, o.decode_per_s)]
        table.add_row(exact.name, *(w.rate(rate) for rate in rates))
    return table


def stages_table(plan: Plan) -> Table:
    """Rate at which each stage binds, and its slack."""
    found = plan.exact.prfaas.operation
    title = f"Stages: {found.binding.value} binds"
    table = plain_table(title, "stage", "binds at Λ, req/s", "slack")
    for stage, capacity in found.capacity_per_s.items():
        table.add_row(stage.value, w.rate(capacity), w.percent(found.slack(stage)))
    return table


def latency_table(plan: Plan, *, wide: bool = False) -> Table:
    """Times to first token; the median of queued ones and P90 of overlapped ones only if wide."""
    times = plan.latencies
    columns = ["service\nmean", "\nP90", "overlap\nmean", "queued\nmean", "\nP90", "\nP99"]
    if wide:
        columns = [*columns[:3], "overlap P90", columns[3], "queued P50", *columns[4:]]
    title = f"Time to first token; queued at {times.arrival_per_s:.2f} req/s (approximate)"
    table = plain_table(title, "design", *columns)
    overloads = "".join(
        f"; inf: {stage.value} of {name} is overloaded" for name, stage in times.overloaded.items()
    )
    table.caption = f"service: the paper's way; P99: range seen in simulation{overloads}"
    for name, service in times.service.items():
        overlapped, queued = times.overlapped[name], times.queued[name]
        shown = [service.mean, service.p90, overlapped.mean, queued.mean, queued.p90]
        if wide:
            shown = [*shown[:3], overlapped.p90, queued.mean, queued.p50, queued.p90]
        table.add_row(name, *(w.seconds(value) for value in shown), w.between(*queued.p99_range))
    return table


def shadow_table(plan: Plan) -> Table:
    """Value of one more unit of each resource."""
    table = plain_table("One more unit, settings re-optimised", "unit", "ΔΛ, req/s")
    for value in plan.shadow:
        table.add_row(value.what, f"{value.rate_gain_per_s:+.3f}")
    return table


def facts_table(plan: Plan) -> Table:
    """Single figures of the plan: name and value in words."""
    found, price = plan.exact.prfaas.operation, plan.break_even_price
    table = Table.grid(padding=(0, 2))
    rows = [
        ("offloaded", f"{w.percent(found.offload_fraction)} of requests"),
        ("mean length offloaded / local", f"{found.mean_long:,.0f} / {found.mean_short:,.0f}"),
        ("pays above a bandwidth of", w.bandwidth(plan.break_even_bits_per_s)),
        ("fetching beats recomputing above", w.bandwidth(plan.recompute_bits_per_s)),
        ("break-even price of 1 TB", price.reason or w.price(price.per_tb)),
    ]
    times, name = plan.latencies, plan.exact.prfaas.name
    if (early := times.early.get(name)) is not None:
        second_s = times.overlapped[name].mean
        said = f"{w.seconds(early.mean)}, 2nd {w.seconds(second_s)}"
        rows.append(("TTFT if prefill gives the token", said))
        step_ns = step_time(plan.question.problem.pd.decode)(1, found.mean_long)
        num_tokens = max(0.0, second_s - early.mean) * NS_PER_S / step_ns
        if num_tokens >= STEPS_MIN:
            rows.append(("relay decode gives by then", f"{num_tokens:,.0f} tokens more"))
    if (sizing := plan.sizing) is not None:
        problem, demand = plan.question.problem, f"{sizing.demand_per_s:,.6g} req/s"
        fleets = {
            f"cheapest for {demand}": sizing.cheapest,
            "without PrfaaS instances": sizing.homogeneous,
        }
        rows[:0] = [
            (name, "none" if fleet is None else fleet_in_words(problem, fleet))
            for name, fleet in fleets.items()
        ]
    for name, value in rows:
        table.add_row(Text(name, style="dim"), value)
    return table


def tornado_table(plan: Plan) -> Table:
    """Gain with each input lower and higher."""
    table = plain_table("Gain at equal cost with one input 20 % off", "input", "-20 %", "+20 %")
    for swing in plan.tornado:
        low, high = (w.percent(x, signed=True) for x in (swing.low, swing.high))
        table.add_row(swing.what, low, high)
    return table


def sources_table(plan: Plan) -> Table:
    """Origins of the plan's times and sizes."""
    problem, geometry = plan.question.problem, plan.question.problem.geometry
    table = plain_table("", "what", "source")
    for profile in problem.prefill_profiles:
        table.add_row(f"prefill, {profile.name}", profile.source)
    table.add_row(f"decode, {problem.pd.name}", problem.pd.decode.source)
    for group in geometry.groups:
        shape = f"{group.num_layers} x {group.kind.value}: {group.detail}".rstrip(": ")
        size = f"{group.token_bytes:,} B per token" if group.token_bytes else ""
        state = f"{group.state_bytes:,} B per sequence" if group.state_bytes else ""
        table.add_row(f"KV cache of {geometry.name}", f"{shape}, {size or state} and layer")
    return table


_ANSWER_STYLE = {
    VerdictAnswer.PAYS: "green",
    VerdictAnswer.DOES_NOT_PAY: "red",
    VerdictAnswer.DEPENDS: "yellow",
}
_PLOT_COLUMNS_MAX = 100
_PLOT_VIEW = 0.97  # the plot ends where 97 % of requests are local


def print_verdict(plan: Plan, console: Console) -> None:
    """Write the verdict and the four numbers behind it, and what else was asked for."""
    _print_sentence(plan, console)
    ours = plan.exact.prfaas
    found, beside = ours.operation, plan.exact.equal_cost
    links = sum(each.link.bits_per_s for each in plan.question.problem.prfaas)
    table = plain_table("", "", "", "")
    table.show_header = False
    egress = w.bandwidth(found.egress_bits_per_s) if found.egress_bits_per_s else "-"
    for name, value, compared in (
        ("gain at equal cost", w.percent(plan.exact.gain, signed=True), ""),
        ("offload above", f"{w.tokens(found.whole_threshold)} tokens", ""),
        (
            "carried",
            f"{w.rate(found.rate_per_s)} req/s",
            f"{w.rate(beside.operation.rate_per_s)} {beside.name}",
        ),
        ("of the links", egress, f"of {w.bandwidth(links)}"),
    ):
        table.add_row(name, value, compared)
    for part in (table, *coding_tables(plan)):
        console.print()
        console.print(part)
    _print_notes(plan, console)
    console.print()
    console.print("All tables: --details; as a page: --report FILE.html", style="dim")


def _print_sentence(plan: Plan, console: Console) -> None:
    style = f"bold {_ANSWER_STYLE[plan.verdict.answer]}"
    console.print(Text(plan.question.problem.title, style="bold"))
    console.print(Text(plan.verdict.sentence, style=style))


def _print_notes(plan: Plan, console: Console) -> None:
    for note in plan.notes:
        console.print(f"Note: {note}", style="yellow", highlight=False)


def print_plan(plan: Plan, console: Console, *, is_page: bool = False) -> None:
    """Write the whole plan; a page also has wide tables, the split and the sources of numbers."""
    _print_sentence(plan, console)
    columns = min(console.width, _PLOT_COLUMNS_MAX)
    parts = [
        *designs_tables(plan, wide=is_page),
        *coding_tables(plan),
        throughputs_table(plan),
        stages_table(plan),
        latency_table(plan, wide=is_page),
        Group(shadow_table(plan), facts_table(plan)),
        tornado_table(plan),
        *((_split_plot(plan, columns), sources_table(plan)) if is_page else ()),
        _threshold_plot(plan, columns),
    ]
    for part in parts:
        console.print()
        console.print(part)
    _print_notes(plan, console)


def _threshold_plot(plan: Plan, columns: int) -> Text:
    problem, found = plan.question.problem, plan.exact.prfaas.operation
    (last,) = problem.workload.lengths.quantiles(np.array([_PLOT_VIEW])).tolist()
    last = max(last, 1.2 * (found.offload_threshold or 0))
    split = f"{found.num_prefill} : {found.num_decode}"
    curve = against_threshold(problem, found)
    lines = _lines(curve, curve.x <= last, curve.x / 1e3)
    return plot(
        f"Λ against the threshold, N_p : N_d = {split}", "t, thousand tokens", lines, columns
    )


def _split_plot(plan: Plan, columns: int) -> Text:
    problem, found = plan.question.problem, plan.exact.prfaas.operation
    curve = against_split(problem, found)
    title = f"Λ against the split, t = {w.tokens(found.whole_threshold)} tokens"
    return plot(title, "N_p", _lines(curve, curve.x >= 0, curve.x), columns)


def _lines(curve: Curve, is_shown: npt.NDArray[np.bool_], x: FloatArray) -> Iterator[Line]:
    """The rates of a curve, without points far above Λ."""
    top = float(np.nanmax(curve.rate)) * 1.6
    for name, values in (
        ("PrfaaS", curve.prfaas),
        ("PD-P", curve.pd_prefill),
        ("PD-D", curve.decode),
        ("Λ, req/s", curve.rate),
    ):
        keep = np.isfinite(values) & (values <= top) & is_shown
        yield name, x[keep].tolist(), values[keep].tolist()
