"""Actions of `prfaas plan` and `prfaas model`; their imports take most of a second."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from prfaas.cli.plan import plan_confirm
from prfaas.core.transfer.tcp_goodput import CongestionControl, TcpEnds
from prfaas.errors import ConfigError
from prfaas.planner.answer.plan import Plan, make_plan
from prfaas.planner.answer.plan_loader import Question, load_question, read_config_json
from prfaas.planner.answer.verdict import VerdictAnswer
from prfaas.planner.fit_map.axes import Axes
from prfaas.planner.fit_map.make import FitMap, as_dict, make_map
from prfaas.planner.fit_map.view import print_maps
from prfaas.planner.hardware.profiles import PrefillProfile
from prfaas.planner.hardware.roofline import ModelSize
from prfaas.planner.model.active_parameters import active_parameters
from prfaas.planner.model.catalogue import find_model, models
from prfaas.planner.model.hf_config import geometry_from_config
from prfaas.planner.model.kv_geometry import KvGeometry
from prfaas.planner.report import json_report, model_report
from prfaas.planner.report.json_report import deployment_settings, is_of_the_file, recommended
from prfaas.planner.report.terminal import print_plan, print_verdict
from prfaas.presentation import console_for, recorded_page, write_file
from prfaas.sweeps import SweepPlace

FILES_MAX = 16
"""Plan files of one map."""
_COLUMNS = 100  # of output that goes to a file or a pipe


@dataclass(frozen=True, slots=True)
class MapView:
    """A request for maps: the questions, the axes, the form of the answer."""

    files: Sequence[Path]
    settings: Sequence[str]
    """Changes to each of them."""
    axes: Axes
    """The points of the map."""
    control: CongestionControl | None
    """Congestion control; None is the plan's, of its first PrfaaS cluster."""
    num_nodes: int
    """Pool nodes of each PrfaaS cluster; 0 is what the plan has."""
    as_json: bool
    """JSON instead of tables."""
    report: Path | None
    """File of the tables, .html, or None."""


def show_maps(view: MapView) -> None:
    """Make the maps and show them.

    Raises:
        ConfigError: A plan is wrong, there are too many, or the file cannot be written.
    """
    if len(view.files) > FILES_MAX:
        raise ConfigError(f"{len(view.files)} plan files are given; at most {FILES_MAX} are drawn")
    if view.report is not None and view.report.suffix != ".html":
        raise ConfigError(f"--report {view.report}: a map is written as .html")
    maps = _made(view)
    if view.report is not None:
        _write(view.report, recorded_page(partial(print_maps, maps), "Where it pays"))
    if view.as_json:
        found = {"maps": [as_dict(each) for each in maps]}
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    print_maps(maps, console_for(_COLUMNS))


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


@dataclass(frozen=True, slots=True)
class ModelView:
    """Options of `prfaas model`; "auto" and None are described there."""

    config: str
    kv_dtype: str
    state_dtype: str
    block_size: int | None
    times: Path | None
    accelerator: str
    gpus: int
    efficiency: float
    active_parameters: float | None
    tokens: tuple[int, ...]
    as_json: bool


@dataclass(frozen=True, slots=True)
class PlanView:
    """The form of an answer."""

    as_json: bool
    """JSON instead of tables."""
    report: Path | None
    """Path of an HTML report, or None."""
    emit: bool
    """Only the settings for a deployment file."""
    num_seeds: int
    """Simulations of each fleet that confirm the answer; 0 simulates nothing."""
    place: SweepPlace = field(default_factory=SweepPlace)
    with_classes: bool = False
    """Every class of the links, too."""
    with_details: bool = False
    """All tables and the plot, not the verdict and its numbers alone."""


def show_plan(file: Path, settings: Sequence[str], view: PlanView) -> int:
    """Answer a plan file in the form that was asked for; ConfigError if the question is wrong, or
    the report cannot be written.

    Returns:
        Exit code: 1 if the answer was to be confirmed and was not.
    """
    if view.emit and view.as_json:
        raise ConfigError("--emit prints TOML and --json prints JSON; choose one")
    if view.report is not None and view.report.suffix not in {".html", ".htm"}:
        raise ConfigError(f"--report {view.report}: a plan is written as .html")
    answer = make_plan(load_question(file, settings), with_classes=view.with_classes)
    confirmation = (
        plan_confirm.confirm(answer, view.num_seeds, view.place) if view.num_seeds else None
    )
    if view.report is not None:
        said = [] if confirmation is None else [confirmation.sentence]
        shown = replace(answer, notes=[*answer.notes, *said])
        title, verdict = answer.question.problem.title, answer.verdict.sentence
        _write(view.report, recorded_page(partial(print_plan, shown, is_page=True), title, verdict))
    if view.emit:
        _emit(answer, confirmation)
    elif view.as_json:
        found = json_report.as_dict(answer)
        if confirmation is not None:
            found["confirmation"] = plan_confirm.as_dict(confirmation)
        is_utf8 = sys.stdout.encoding.lower() in ("utf-8", "utf8")
        click.echo(json.dumps(found, indent=2, ensure_ascii=not is_utf8))
    else:
        console = console_for(_COLUMNS)
        (print_plan if view.with_details else print_verdict)(answer, console)
        if confirmation is not None:
            plan_confirm.print_confirmation(confirmation, console)
    return 0 if confirmation is None or confirmation.confirmed else 1


def _emit(answer: Plan, confirmation: plan_confirm.Confirmation | None) -> None:
    fleet = recommended(answer)
    if confirmation is not None and confirmation.next_one is not None:
        larger = confirmation.next_one
        fleet = replace(larger, name=f"the first that the simulator confirms, {larger.name}")
    click.echo(deployment_settings(answer, fleet), nl=False)
    if answer.verdict.answer is not VerdictAnswer.PAYS:
        click.echo(f"note: {answer.verdict.sentence}", err=True)
    if confirmation is not None:
        click.echo(f"note: {confirmation.sentence}", err=True)
    if not is_of_the_file(answer, fleet):
        click.echo(
            f"note: the settings are for another fleet than the plan file's: {fleet.name}; leave "
            "workload.arrival_rate out for settings of the file's fleet",
            err=True,
        )


def _write(report: Path, page: str) -> None:
    write_file("--report", report, page)
    click.echo(f"wrote {report}", err=True)


def show_catalogue() -> None:
    """List the models of the catalogue."""
    console_for(_COLUMNS).print(model_report.catalogue_table(models()))


def show_model(view: ModelView) -> None:
    """Show the KV geometry and Φ_kv of a model; ConfigError if the model is unknown or not
    understood."""
    geometry, size = _model(view)
    times = _times(view, geometry, size)
    lengths = view.tokens or model_report.LENGTHS
    if view.as_json:
        found = model_report.as_dict(geometry, view.block_size, times, lengths)
        click.echo(json.dumps(found, indent=2))
    else:
        console = console_for(_COLUMNS)
        model_report.print_geometry(geometry, view.block_size, times, lengths, console)


def _model(view: ModelView) -> tuple[KvGeometry, ModelSize | None]:
    path = Path(view.config)
    if path.is_dir():  # a checkpoint
        path = path / "config.json"
    if path.suffix == ".json" or path.is_file():
        name, fields = path.name, read_config_json(path)
        parameters = view.active_parameters or active_parameters(fields, name)
    else:
        known = find_model(view.config)
        name, fields = known.name, known.config
        parameters = view.active_parameters or known.active_parameters
    geometry = geometry_from_config(
        fields, name=name, kv_dtype=view.kv_dtype, state_dtype=view.state_dtype
    )
    return geometry, ModelSize(parameters, parameters, fields) if parameters else None


def _times(view: ModelView, geometry: KvGeometry, size: ModelSize | None) -> PrefillProfile | None:
    if view.times is not None:
        return model_report.load_prefill(view.times)
    if size is None:
        return None
    return model_report.roofline_prefill(
        geometry, size, view.accelerator, num_gpus=view.gpus, efficiency=view.efficiency
    )
