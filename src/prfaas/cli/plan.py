"""`prfaas plan`, `prfaas model`, `prfaas profile`: ask before buying."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console

from prfaas.cli.profile import profile
from prfaas.errors import ConfigError
from prfaas.planner import machine_report, model_report
from prfaas.planner.catalogue import find_model, models
from prfaas.planner.emit import deployment_settings
from prfaas.planner.hf_config import geometry_from_config
from prfaas.planner.html_report import html_report
from prfaas.planner.load import load_question, read_config_json
from prfaas.planner.plan import make_plan
from prfaas.planner.roofline import ModelSize
from prfaas.planner.terminal import print_plan

__all__ = ["model", "plan", "profile"]

_FILE = click.Path(dir_okay=False, path_type=Path)
_DEFAULT_WIDTH = 110


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_DEFAULT_WIDTH)
    return console


@click.command()
@click.argument("file", type=_FILE)
@click.option("--set", "settings", multiple=True, metavar="A.B=V", help="Change one setting.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option("--report", type=_FILE, help="Write a self-contained HTML report.")
@click.option("--emit", is_flag=True, help="Print the settings for a deployment file, only.")
def plan(
    file: Path, settings: tuple[str, ...], as_json: bool, report: Path | None, emit: bool
) -> None:
    """Does Prefill-as-a-Service pay, and with what settings?

    FILE is a plan file: model, workload, clusters, links and prices; see examples/plan.
    """
    answer = make_plan(load_question(file, settings))
    if report is not None:
        try:
            report.write_text(html_report(answer), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--report {report}: {error.strerror}") from None
        click.echo(f"wrote {report}", err=True)
    if emit:
        click.echo(deployment_settings(answer), nl=False)
    elif as_json:
        click.echo(json.dumps(machine_report.as_dict(answer), indent=2, ensure_ascii=False))
    else:
        print_plan(answer, _console())


@click.command()
@click.argument("config", required=False)
@click.option("--list", "list_all", is_flag=True, help="List the catalogue.")
@click.option("--kv-dtype", default="auto", help="Format of keys and values, such as fp8.")
@click.option("--state-dtype", default="auto", help="Format of recurrent states.")
@click.option("--block-size", type=click.IntRange(min=1), help="Block, tokens; pads pages.")
@click.option("--profile", "times", type=_FILE, help="Prefill profile, for the KV throughput.")
@click.option("--accelerator", default="h200", show_default=True, help="For a roofline of Φ_kv.")
@click.option("--gpus", type=click.IntRange(min=1), default=8, show_default=True)
@click.option(
    "--efficiency",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Share of the tensor peak that prefill reaches; 1 gives a ceiling.",
)
@click.option("--active-parameters", type=float, help="Weights that one token uses, as in 17e9.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def model(
    config: str | None,
    *,
    list_all: bool,
    kv_dtype: str,
    state_dtype: str,
    block_size: int | None,
    times: Path | None,
    accelerator: str,
    gpus: int,
    efficiency: float,
    active_parameters: float | None,
    as_json: bool,
) -> None:
    """What a model leaves in the KV cache.

    CONFIG is a Hugging Face config.json, or the name of a model in the catalogue.
    """
    console = _console()
    if list_all:
        console.print(model_report.catalogue_table(models()))
        return
    if config is None:
        raise click.UsageError("give a config.json or a model's name, or --list")
    path = Path(config)
    if path.suffix == ".json" or path.is_file():
        name, fields, parameters = path.name, read_config_json(path), active_parameters
    else:
        known = find_model(config)
        name, fields = known.name, known.config
        parameters = active_parameters or known.active_parameters
    geometry = geometry_from_config(fields, name=name, kv_dtype=kv_dtype, state_dtype=state_dtype)
    prefill = None
    if times is not None:
        prefill = model_report.load_prefill(times)
    elif parameters:
        size = ModelSize(parameters, parameters, fields)
        prefill = model_report.roofline_prefill(
            geometry, size, accelerator, num_gpus=gpus, efficiency=efficiency
        )
    if as_json:
        click.echo(json.dumps(model_report.as_dict(geometry, block_size, prefill), indent=2))
    else:
        model_report.print_geometry(geometry, block_size, prefill, console)
