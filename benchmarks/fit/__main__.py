"""Pictures and tables of docs/results/fit.md: the map of five families, and the simulator's word.

    python -m benchmarks.fit --images docs/images          # two minutes
    python -m benchmarks.fit --images docs/images --confirm    # ten

The measured transport is in `python -m benchmarks.fit.transport`.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path as File

from benchmarks.fit.confirm import Confirmed, confirm
from benchmarks.fit.families import FAMILIES, file_of
from benchmarks.fit.picture import svg
from prfaas import units as w
from prfaas.core.transfer.tcp_goodput import CongestionControl, TcpEnds, TcpPath
from prfaas.planner.answer.plan_loader import Question, load_question
from prfaas.planner.fit_map.axes import parse_axes
from prfaas.planner.fit_map.make import FitMap, make_map, scaled
from prfaas.planner.fit_map.point import Fit
from prfaas.sim.sizing import SIMULATED_WITH

PLANS = File(__file__).parents[2] / "examples" / "plan" / "families"
LENGTHS, LOSSES = "0.125,0.5,1", "0,0.1%,1%"
NEAR_AND_AWAY = (0.25, 0.75, 1.33, 4.0)
NEVER_TRIED = (10e9, 100e9)
NEAR_RTT_S, FAR_RTT_S, CONFIRMED_LOSS = 0.01, 0.16, 0.001


def line(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def head(*titles: str) -> None:
    line(*titles)
    print(f"|{'---|' * len(titles)}", flush=True)


def note(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=File, required=True, help="where the pictures are written")
    parser.add_argument("--confirm", action="store_true", help="simulate points of the map")
    arguments = parser.parse_args()
    questions = [load_question(PLANS / file_of(family)) for family in FAMILIES]
    for control in CongestionControl:
        maps = _maps(questions, control)
        (arguments.images / f"fit-{control}.svg").write_text(svg(maps), encoding="utf-8")
        print(f"\n{control}, bandwidth from which it pays:\n")
        crossovers(maps)
        print()
        counts(maps)
        if control is CongestionControl.BBR:
            print()
            moved(maps)
            if arguments.confirm:
                print()
                confirmations(questions, maps)


def _maps(questions: Sequence[Question], control: CongestionControl) -> list[FitMap]:
    axes = parse_axes(losses=LOSSES, lengths=LENGTHS)
    made = []
    for question in questions:
        note(f"map: {question.problem.title}, {control}")
        made.append(make_map(question, axes, TcpEnds(0, control=control)))
    return made


def crossovers(maps: Sequence[FitMap]) -> None:
    axes = maps[0].axes
    losses = [w.loss(loss) for loss in axes.loss]
    head("family", "mean new tokens", "loss", *(f"{rtt_s * 1e3:g} ms" for rtt_s in axes.rtt_s))
    for found in maps:
        for mix in found.mixes:
            rows = [
                tuple(mix.crossovers[loss, rtt_s].text for rtt_s in axes.rtt_s)
                for loss in axes.loss
            ]
            for shown, row in _merged(losses, rows):
                line(found.title, f"{mix.mean_tokens:,.0f}", shown, *row)


def _merged(
    labels: list[str], rows: list[tuple[str, ...]]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Rows that are alike, once, with all their labels."""
    for row in dict.fromkeys(rows):
        same = [label for label, other in zip(labels, rows, strict=True) if other == row]
        yield ", ".join(same), row


def counts(maps: Sequence[FitMap]) -> None:
    reasons = sorted({reason for found in maps for mix in found.mixes for reason in mix.reasons()})
    head("family", *(fit.value for fit in Fit), *(f"? {reason}" for reason in reasons))
    for found in maps:
        by_reason = [sum(mix.reasons()[reason] for mix in found.mixes) for reason in reasons]
        line(found.title, *(str(found.count(fit)) for fit in Fit), *map(str, by_reason))


def moved(maps: Sequence[FitMap]) -> None:
    head("family", "round trip", "pays from", "what moves it most")
    for found in maps:
        for each in found.moved:
            changes = sorted(each.movers, key=lambda mover: -abs(_log(mover.ratio)))
            shown = [f"{m.what}: {m.crossover.text}" for m in changes if m.ratio != 1][:6]
            rtt = f"{each.path.rtt_s * 1e3:g} ms"
            line(found.title, rtt, each.base.text, "; ".join(shown) or "nothing that was tried")


def _log(ratio: float) -> float:
    return math.log(min(max(ratio, 1e-6), 1e6))


def confirmations(questions: Sequence[Question], maps: Sequence[FitMap]) -> None:
    print(f"Simulated with {SIMULATED_WITH}.\n")
    head(
        "family", "mean new tokens", "path", "planner, req/s", "simulator, req/s", "gain, planner",
        "gain, simulator", "map", "signs agree",
    )  # fmt: skip
    for question, found in zip(questions, maps, strict=True):
        for mix in found.mixes[1:]:
            problem = scaled(question.problem, mix.factor)
            for path in dict.fromkeys(_paths(found, mix.factor)):
                note(f"confirm: {found.title}, {mix.mean_tokens:,.0f} tokens, {path}")
                confirmed = confirm(problem, path, found.transport)
                line(found.title, f"{mix.mean_tokens:,.0f}", *_cells(confirmed))


def _paths(found: FitMap, factor: float) -> Iterator[TcpPath]:
    """Points near the crossover and away from it."""
    (mix,) = (mix for mix in found.mixes if mix.factor == factor)
    crossing = mix.crossovers[CONFIRMED_LOSS, NEAR_RTT_S].bits_per_s
    found_one = 0 < crossing < math.inf
    tried = [crossing * f for f in NEAR_AND_AWAY] if found_one else NEVER_TRIED
    for bits_per_s in tried:
        yield TcpPath(float(f"{bits_per_s:.2g}"), NEAR_RTT_S, CONFIRMED_LOSS)
    yield TcpPath(NEVER_TRIED[-1], FAR_RTT_S, CONFIRMED_LOSS)


def _cells(found: Confirmed) -> Iterator[str]:
    path, point = found.point.path, found.point
    yield f"{w.short_bandwidth(path.bits_per_s)}, {path.rtt_s * 1e3:g} ms, {w.loss(path.loss)}"
    yield f"{found.planned_per_s:.3f}"
    yield f"{found.simulated_per_s:.3f}"
    yield f"{point.gain:+.1%}"
    yield f"{found.gain:+.1%}"
    yield point.fit.value
    yield "yes" if found.agrees else "**no**"


if __name__ == "__main__":
    main()
