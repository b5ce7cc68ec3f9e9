"""`prfaas plan --map`: read the plans, make their maps, show them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from prfaas.cli.common.console import console_for
from prfaas.core.transfer.tcp_goodput import CongestionControl, TcpEnds
from prfaas.errors import ConfigError
from prfaas.planner.answer.plan_loader import Question, load_question
from prfaas.planner.fit_map.as_json import as_dict
from prfaas.planner.fit_map.axes import Axes
from prfaas.planner.fit_map.make import FitMap, make_map
from prfaas.planner.fit_map.page import html_page
from prfaas.planner.fit_map.picture import svg
from prfaas.planner.fit_map.terminal import print_map

FILES_MAX = 16
"""Plan files of one map."""
_COLUMNS = 100  # of output that goes to a file or a pipe
_WRITERS = {".svg": svg, ".html": html_page}


@dataclass(frozen=True, slots=True)
class MapView:
    """A request for maps: the questions, the axes, the form of the answer.

    Args:
        settings: Changes to each of them.
        axes: The points of the map.
        control: Congestion control; None is the plan's, of its first PrfaaS cluster.
        num_nodes: Pool nodes of each PrfaaS cluster; 0 is what the plan has.
        as_json: JSON instead of tables.
        report: File of the picture, .svg or .html, or None.
    """

    files: Sequence[Path]
    settings: Sequence[str]
    axes: Axes
    control: CongestionControl | None
    num_nodes: int
    as_json: bool
    report: Path | None


def show_maps(view: MapView) -> None:
    """Make the maps and show them.

    Raises:
        ConfigError: A plan is wrong, there are too many, or the picture cannot be written.
    """
    if len(view.files) > FILES_MAX:
        raise ConfigError(f"{len(view.files)} plan files are given; at most {FILES_MAX} are drawn")
    if view.report is not None and view.report.suffix not in _WRITERS:
        raise ConfigError(f"--report {view.report}: a map is written as .svg or .html")
    maps = _made(view)
    if view.report is not None:
        _write(maps, view.report)
    if view.as_json:
        found = {"maps": [as_dict(each) for each in maps]}
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    console = console_for(_COLUMNS)
    for index, each in enumerate(maps):
        if index:
            console.print()
        print_map(each, console)


def _made(view: MapView) -> list[FitMap]:
    questions = [load_question(file, view.settings) for file in view.files]
    shown = Console(stderr=True)
    with Progress(console=shown, transient=True, disable=not shown.is_terminal) as progress:
        maps = []
        for question in questions:
            task = progress.add_task(question.problem.title)

            def report(done: int, rows: int, task: object = task) -> None:
                progress.update(task, completed=done, total=rows)  # type: ignore[arg-type]

            maps.append(make_map(question, view.axes, _transport(view, question), report))
    return maps


def _transport(view: MapView, question: Question) -> TcpEnds:
    ends = next((cluster.link.transport for cluster in question.problem.prfaas), None)
    planned = CongestionControl.BBR if ends is None else ends.control
    return TcpEnds(view.num_nodes, control=view.control or planned)


def _write(maps: Sequence[FitMap], report: Path) -> None:
    try:
        report.write_text(_WRITERS[report.suffix](maps), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--report {report}: {error.strerror}") from None
    click.echo(f"wrote {report}", err=True)
