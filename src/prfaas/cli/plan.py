"""`prfaas plan`, `prfaas model`, `prfaas profile`: ask before buying.

The actions are imported when a command runs: scipy, plotly and plotext take most of a second, and
the other commands of `prfaas` do without them.
"""

from __future__ import annotations

import random
from pathlib import Path

import click

from prfaas.errors import ConfigError

__all__ = ["model", "plan", "profile"]

_FILE = click.Path(dir_okay=False, path_type=Path)


def _counts(_ctx: click.Context, _param: click.Parameter, text: str) -> tuple[int, ...]:
    """Rising positive integers, as in 1024,8192."""
    if not text:
        return ()
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of integers, as in 1024,8192") from None
    if min(found) < 1 or list(found) != sorted(set(found)):
        raise click.BadParameter(f"{text!r}: the numbers have to be above 0 and rise")
    return found


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
    from prfaas.cli.plan_actions import show_plan

    show_plan(file, settings, as_json=as_json, report=report, emit=emit)


@click.command()
@click.argument("config", required=False)
@click.option("--list", "list_all", is_flag=True, help="List the catalogue.")
@click.option("--kv-dtype", default="auto", help="Format of keys and values, such as fp8.")
@click.option("--state-dtype", default="auto", help="Format of recurrent states.")
@click.option("--block-size", type=click.IntRange(min=1), help="Block, tokens; pads pages.")
@click.option("--profile", "times", type=_FILE, help="Prefill profile, for the KV throughput.")
@click.option("--accelerator", default="h200", show_default=True, help="For a roofline of Φ_kv.")
@click.option(
    "--gpus",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="GPUs of the roofline's instance.",
)
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
    """What a model leaves in the KV cache, and its KV throughput.

    CONFIG is a Hugging Face config.json, or the name of a model in the catalogue.
    """
    from prfaas.cli.plan_actions import ModelView, show_catalogue, show_model

    if list_all:
        show_catalogue()
        return
    if config is None:
        raise click.UsageError("give a config.json or a model's name, or --list")
    view = ModelView(
        config=config,
        kv_dtype=kv_dtype,
        state_dtype=state_dtype,
        block_size=block_size,
        times=times,
        accelerator=accelerator,
        gpus=gpus,
        efficiency=efficiency,
        active_parameters=active_parameters,
        as_json=as_json,
    )
    show_model(view)


@click.command()
@click.argument("url")
@click.option("--model", required=True, help="Name of the served model.")
@click.option("--hardware", required=True, help="What it runs on, for the provenance.")
@click.option(
    "--lengths",
    callback=_counts,
    default="512,1024,2048,4096,8192,16384,32768",
    show_default=True,
    help="Prompt lengths, tokens.",
)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True)
@click.option(
    "--batches", callback=_counts, default="", help="Also measure decode with so many requests."
)
@click.option(
    "--contexts",
    callback=_counts,
    default="1024,8192",
    show_default=True,
    help="Prompt lengths for decode, tokens.",
)
@click.option("--output-tokens", type=click.IntRange(min=4), default=64, show_default=True)
@click.option("--max-token-id", type=click.IntRange(min=10), default=500, show_default=True)
@click.option("--seed", type=int, default=None, help="Seed of the prompts; random if absent.")
@click.option("--api-key", envvar="PRFAAS_API_KEY", help="Bearer token.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True)
def profile(
    *,
    url: str,
    model: str,
    hardware: str,
    lengths: tuple[int, ...],
    repeats: int,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    output_tokens: int,
    max_token_id: int,
    seed: int | None,
    api_key: str | None,
    out: Path,
) -> None:
    """Measure prefill (and decode) times of a running OpenAI-compatible engine.

    URL is the engine, such as http://localhost:8000. It should serve nothing else meanwhile.
    Prompts are random token ids, so its prefix cache does not help. A used seed meets its own
    prompts in the cache.
    """
    if len(lengths) < 2:
        raise ConfigError(f"--lengths has {len(lengths)} value; a curve needs at least 2")
    if seed is None:
        seed = random.SystemRandom().randrange(2**32)
    from prfaas.cli.measure_actions import Sweep, measure_engine

    sweep = Sweep(
        url=url,
        model=model,
        hardware=hardware,
        lengths=lengths,
        repeats=repeats,
        batches=batches,
        contexts=contexts,
        output_tokens=output_tokens,
        token_id_max=max_token_id,
        seed=seed,
        api_key=api_key,
    )
    measure_engine(sweep, out)
