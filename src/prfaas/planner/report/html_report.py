"""The plan as one self-contained HTML file that opens without a network."""

from __future__ import annotations

from html import escape

from prfaas.planner import formatting as w
from prfaas.planner.answer.plan import Comparison, Plan
from prfaas.planner.answer.verdict import VerdictAnswer
from prfaas.planner.report import html_figures as figures
from prfaas.planner.report.coding import (
    CLASS_HEAD,
    HEAD,
    class_rows,
    coding_rows,
    links_in_words,
)
from prfaas.planner.report.html_parts import figure, page, table
from prfaas.planner.report.summary import facts, overloads
from prfaas.planner.solve.designs import Design

_ANSWER_CLASS = {
    VerdictAnswer.PAYS: "pays",
    VerdictAnswer.DOES_NOT_PAY: "does-not-pay",
    VerdictAnswer.DEPENDS: "depends",
}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1180px; margin: 2em auto;
       padding: 0 1em; }
h1 { font-size: 1.6em; margin-bottom: .4em; }
h2 { font-size: 1.2em; margin-top: 2em; }
.verdict { padding: .9em 1.1em; border-left: 6px solid; font-size: 1.1em; }
.pays { background: #e6f5ef; border-color: #009e73; }
.does-not-pay { background: #fbeae2; border-color: #d55e00; }
.depends { background: #fdf4df; border-color: #e69f00; }
table { border-collapse: collapse; width: 100%; margin: .6em 0 1.2em; }
th, td { text-align: right; padding: .3em .7em; border-bottom: 1px solid #ddd; }
th { color: #555; font-weight: 600; }
th + th, td + td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.pair { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(480px, 100%), 1fr));
        gap: 1.5em; }
.pair > div { min-width: 0; }
.narrow { max-width: 620px; }
.notes { color: #7a4a00; }
.sources th, .sources td { text-align: left; vertical-align: top; }
.sources td + td { white-space: normal; }
small { color: #666; }
"""


def html_report(plan: Plan) -> str:
    """The whole report; plotly.js is inside, so the file is about 5 MB."""
    problem, verdict = plan.question.problem, plan.verdict
    body = [
        f"<h1>{escape(problem.title)}</h1>",
        f'<p class="verdict {_ANSWER_CLASS[verdict.answer]}">{escape(verdict.sentence)}</p>',
        _notes(plan.notes),
        '<div class="pair">',
        figure(figures.threshold_figure(plan), first=True),
        figure(figures.split_figure(plan)),
        "</div>",
        "<h2>Designs</h2>",
        _designs("Exact expectations E[T(L)]", plan.exact),
        _designs("The paper's representative lengths T(E[L])", plan.paper),
        '<div class="pair">',
        figure(figures.stages_figure(plan)),
        figure(figures.egress_figure(plan)),
        "</div>",
        figure(figures.cost_figure(plan)),
        _coding(plan),
        _classes(plan),
        "<h2>Break-even points</h2>",
        table(("figure", "value"), facts(plan), css="narrow"),
        "<h2>One more unit, settings re-optimised</h2>",
        table(
            ("unit", "ΔΛ, req/s"),
            [(s.what, f"{s.rate_gain_per_s:+.3f}") for s in plan.shadow],
            css="narrow",
        ),
        "<h2>Time to first token</h2>",
        _latency(plan),
        "<h2>What would change the answer</h2>",
        figure(figures.tornado_figure(plan)),
        "<h2>Sources of the numbers</h2>",
        _sources(plan),
    ]
    return page(problem.title, _STYLE, body)


def _coding(plan: Plan) -> str:
    effect = plan.coding
    if effect is None:
        return ""
    rows = table(HEAD, coding_rows(effect), css="narrow")
    links = escape(links_in_words(effect))
    return f"<h2>Coding of links, {effect.quality}</h2>{rows}<p>{links}</p>"


def _classes(plan: Plan) -> str:
    if not plan.classes:
        return ""
    return f"<h2>Classes of the links</h2>{table(CLASS_HEAD, class_rows(plan.classes))}"


def _notes(notes: list[str]) -> str:
    return "".join(f'<p class="notes">{escape(note)}.</p>' for note in notes)


def _designs(title: str, comparison: Comparison) -> str:
    gain = w.percent(comparison.gain, signed=True)
    head = (
        "design",
        "GPUs",
        "t, tokens",
        "PrfaaS/N_p/N_d",
        "Θ_prfaas",
        "Θ_pd-p",
        "Θ_pd-d",
        "Λ, req/s",
        "egress",
        "price / h",
        "per Mtoken",
    )
    rows = [_design(design) for design in comparison.all]
    return f"<h3>{escape(title)}: {gain} at equal cost</h3>{table(head, rows)}"


def _design(design: Design) -> tuple[str, ...]:
    found = design.operation
    return (
        design.name,
        w.gpus(design.num_gpus),
        w.tokens(found.whole_threshold),
        f"{found.num_prfaas}/{found.num_prefill}/{found.num_decode}",
        w.rate(found.prfaas_per_s),
        w.rate(found.pd_prefill_per_s),
        w.rate(found.decode_per_s),
        w.rate(found.rate_per_s),
        w.bandwidth(found.egress_bits_per_s) if found.egress_bits_per_s else "-",
        w.price(design.price_per_h),
        w.price(design.price_per_mtoken),
    )


def _latency(plan: Plan) -> str:
    times = plan.latencies
    head = (
        "design",
        "mean, paper's way",
        "P90",
        "mean, overlapped",
        "P90",
        "mean, queued",
        "P50",
        "P90",
        "P99",
    )
    rows = []
    for name, service in times.service.items():
        overlapped, queued = times.overlapped[name], times.queued[name]
        figures_s = (
            service.mean,
            service.p90,
            overlapped.mean,
            overlapped.p90,
            queued.mean,
            queued.p50,
            queued.p90,
        )
        p99 = w.between(*queued.p99_range)
        rows.append((name, *(w.seconds(value) for value in figures_s), p99))
    note = (
        f"Queued: Allen-Cunneen approximation at {times.arrival_per_s:.2f} req/s; the simulator "
        f"is the judge, and P99 is the range seen in simulations{overloads(times)}."
    )
    return f"{table(head, rows)}<small>{escape(note)}</small>"


def _sources(plan: Plan) -> str:
    problem = plan.question.problem
    rows = [(f"prefill, {p.name}", p.source) for p in problem.prefill_profiles]
    rows.append((f"decode, {problem.pd.name}", problem.pd.decode.source))
    geometry = problem.geometry
    for group in geometry.groups:
        shape = f"{group.num_layers} x {group.kind.value}: {group.detail}".rstrip(": ")
        size = f"{group.token_bytes:,} B per token" if group.token_bytes else ""
        state = f"{group.state_bytes:,} B per sequence" if group.state_bytes else ""
        rows.append((f"KV cache of {geometry.name}", f"{shape}, {size or state} and layer"))
    return table(("what", "source"), rows, css="sources")
