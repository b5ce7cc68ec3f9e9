"""`prfaas plan`, `prfaas model`, `prfaas profile`: ask before buying.

The actions are imported when a command runs: scipy and plotext take most of a second, and
the other commands of `prfaas` do without them.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from prfaas.cli.common.options import BASE_URL, FILE, PLAN
from prfaas.cli.plan.sweeping import place_options
from prfaas.core.transfer.tcp_goodput import CongestionControl
from prfaas.errors import ConfigError
from prfaas.planner.fit_map.axes import BANDWIDTHS, LENGTHS, LOSSES, RTTS, parse_axes

__all__ = ["model", "plan", "profile"]

_TOKENS_MAX = 1 << 30
_MAP_ONLY = ("bandwidths", "rtts", "losses", "lengths", "congestion_control", "pool_nodes")
"""Parameters that mean nothing without --map."""


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


def _prefixes(ctx: click.Context, param: click.Parameter, text: str) -> tuple[int, ...] | None:
    """Rising positive integers; none with "none", None without any."""
    if not text:
        return None
    return () if text == "none" else _counts(ctx, param, text)


def _finite(_ctx: click.Context, _param: click.Parameter, number: float | None) -> float | None:
    """A positive number, neither infinite nor NaN."""
    if number is not None and not 0 < number < float("inf"):
        raise click.BadParameter(f"{number} is not a positive finite number")
    return number


@click.command()
@click.argument("files", type=PLAN, nargs=-1, required=True, metavar="FILE...")
@click.option("--set", "settings", multiple=True, metavar="A.B=V", help="Change one setting.")
@click.option(
    "--details", "with_details", is_flag=True, help="Print all tables, and the plot, too."
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option("--report", type=FILE, help="Write a self-contained HTML report.")
@click.option("--emit", is_flag=True, help="Print only settings for a deployment file.")
@click.option(
    "--map",
    "as_map",
    is_flag=True,
    help="Print the verdict of each FILE over bandwidth, round trip, loss and prompt lengths.",
)
@click.option(
    "--bandwidths",
    default=BANDWIDTHS,
    help="Bandwidths of the map without loss, of all links together.",
)
@click.option("--rtts", default=RTTS, help="Round trips of the map.")
@click.option("--losses", default=LOSSES, help="Losses of the map.")
@click.option("--lengths", default=LENGTHS, help="Factors of FILE's prompt lengths.")
@click.option(
    "--congestion-control",
    type=click.Choice([control.value for control in CongestionControl]),
    help="Congestion control for the map: cubic if hosts do not allow BBR; FILE's if absent.",
)
@click.option(
    "--pool-nodes",
    type=click.IntRange(min=1),
    help="Pool nodes of each PrfaaS cluster for the map; FILE's if absent.",
)
@click.option(
    "--classes",
    "with_classes",
    is_flag=True,
    help="Add what coding without loss and every quality class change: threshold, egress, price.",
)
@click.option(
    "--confirm",
    is_flag=True,
    help="Simulate the answer, policy paper without admission; exit with 1 if it does not hold.",
)
@click.option(
    "--seeds",
    "num_seeds",
    type=click.IntRange(1, 100),
    default=5,
    help="Runs of each fleet, for --confirm.",
)
@place_options
@click.pass_context
def plan(
    context: click.Context,
    *,
    files: tuple[Path, ...],
    settings: tuple[str, ...],
    as_json: bool,
    report: Path | None,
    emit: bool,
    with_classes: bool,
    with_details: bool,
    confirm: bool,
    num_seeds: int,
    num_workers: int | None,
    ray_address: str | None,
    as_map: bool,
    bandwidths: str,
    rtts: str,
    losses: str,
    lengths: str,
    congestion_control: str | None,
    pool_nodes: int | None,
) -> None:
    """Plan a deployment: verdict, threshold, split and size.

    FILE is a plan file: model, workload, clusters, links and prices; see docs/planner.md. Only
    --map takes several.

    \b
    Examples:
      prfaas plan examples/plan/paper-case-study.toml
      prfaas plan FILE --set 'prfaas.0.link.bandwidth="10Gbps"' --set pd.instances=10
      prfaas plan FILE --set 'prfaas.0.link.codec="auto"'     what coding of the link changes
      prfaas plan FILE --classes                what each quality class of the links changes
      prfaas plan FILE --report plan.html       one HTML file without external resources
      prfaas plan FILE --emit                   settings for `prfaas up`
      prfaas plan FILE --map                    the verdict over bandwidth, round trip and loss
      prfaas plan FILE --map --rtts 5ms,80ms --losses 0.1% --report map.html
      prfaas plan FILE --set workload.arrival_rate=10 --confirm    simulate the answer
    """
    if as_map:
        from prfaas.cli.plan.plan_actions import MapView, show_maps

        axes = parse_axes(bandwidths, rtts, losses, lengths)
        control = CongestionControl(congestion_control) if congestion_control else None
        if emit or confirm or with_classes:
            given = "--emit prints settings" if emit else "--confirm simulates the answer"
            if with_classes:
                given = "--classes compares answers"
            raise ConfigError(f"{given} of one plan; leave it or --map out")
        show_maps(MapView(files, settings, axes, control, pool_nodes or 0, as_json, report))
        return
    for name in _MAP_ONLY:
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise ConfigError(f"--{name.replace('_', '-')} belongs to --map; add it")
    if len(files) > 1:
        raise ConfigError(f"{len(files)} plan files are given; only --map takes several")
    if not confirm and context.get_parameter_source("num_seeds") is not ParameterSource.DEFAULT:
        raise ConfigError("--seeds belongs to --confirm; add it")
    if not confirm and (num_workers is not None or ray_address is not None):
        raise ConfigError("--jobs and --ray belong to --confirm; add it")
    from prfaas.cli.plan.plan_actions import PlanView, show_plan
    from prfaas.sweeps import SweepPlace

    place = SweepPlace(num_workers, ray_address)
    num_runs = num_seeds if confirm else 0
    view = PlanView(as_json, report, emit, num_runs, place, with_classes, with_details)
    context.exit(show_plan(files[0], settings, view))


@click.command()
@click.argument("config", required=False)
@click.option("--list", "list_all", is_flag=True, help="List the catalogue.")
@click.option("--kv-dtype", default="auto", help="Format of keys and values, such as fp8.")
@click.option("--state-dtype", default="auto", help="Format of recurrent states.")
@click.option("--block-size", type=click.IntRange(min=1), help="Block, tokens; pads pages.")
@click.option("--profile", "times", type=FILE, help="Prefill profile, for the KV throughput.")
@click.option("--accelerator", default="h200", help="For a roofline of Φ_kv.")
@click.option(
    "--gpus", type=click.IntRange(min=1), default=8, help="GPUs of the roofline's instance."
)
@click.option(
    "--efficiency",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    help="Share of the tensor peak that prefill reaches; 1 gives a ceiling.",
)
@click.option(
    "--active-parameters",
    type=float,
    callback=_finite,
    help="Weights that one token uses, as in 17e9.",
)
@click.option(
    "--tokens",
    multiple=True,
    type=click.IntRange(1, _TOKENS_MAX),
    help="A prompt, tokens, in place of the lengths that are shown; may be given several times.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def model(config: str | None, *, list_all: bool, **shown: Any) -> None:
    """Show the size of a model's KV cache, and its KV throughput.

    CONFIG is a Hugging Face config.json, or the name of a model in the catalogue.

    \b
    Examples:
      prfaas model config.json --block-size 384 --tokens 6100
      prfaas model llama_3_3_70b --gpus 2 --efficiency 0.43
      prfaas model --list
    """
    from prfaas.cli.plan.plan_actions import ModelView, show_catalogue, show_model

    if list_all:
        show_catalogue()
        return
    if config is None:
        raise click.UsageError("give a config.json or a model's name, or --list")
    show_model(ModelView(config=config, **shown))


@click.command()
@click.argument("url", type=BASE_URL)
@click.option("--model", required=True, help="Name of the served model.")
@click.option("--hardware", required=True, help="Hardware of the engine, for the provenance.")
@click.option(
    "--lengths",
    callback=_counts,
    default="512,1024,2048,4096,8192,16384,32768",
    help="Prompt lengths, tokens.",
)
@click.option(
    "--prefixes",
    callback=_prefixes,
    default="",
    show_default=False,
    metavar="TOKENS,...",
    help="Cached prefixes after which prefill is measured, tokens; a quarter and three quarters of "
    "the longest prompt if absent; none for engines without a prefix cache.",
)
@click.option(
    "--new-tokens",
    callback=_counts,
    default="",
    show_default=False,
    metavar="TOKENS,...",
    help="Tokens after each prefix; an eighth and a 32nd of the longest prompt if absent.",
)
@click.option(
    "--repeats", type=click.IntRange(min=1), default=3, help="Measurements of each length."
)
@click.option(
    "--batches",
    callback=_counts,
    default="",
    show_default=False,
    help="Also measure decode at these batch sizes.",
)
@click.option(
    "--contexts", callback=_counts, default="1024,8192", help="Prompt lengths for decode, tokens."
)
@click.option(
    "--output-tokens",
    type=click.IntRange(min=4),
    default=64,
    help="Output of each decode request, tokens.",
)
@click.option(
    "--max-token-id",
    "token_id_max",
    type=click.IntRange(min=10),
    default=500,
    help="Largest token id in a prompt; below the size of the vocabulary.",
)
@click.option("--seed", type=int, help="Seed of the prompts; random if absent.")
@click.option("--api-key", envvar="PRFAAS_API_KEY", help="Bearer token.")
@click.option("--out", type=FILE, required=True, help="File of the profile, TOML.")
def profile(
    *,
    url: str,
    lengths: tuple[int, ...],
    prefixes: tuple[int, ...] | None,
    new_tokens: tuple[int, ...],
    seed: int | None,
    out: Path,
    **settings: Any,
) -> None:
    """Measure prefill (and decode) times of a running OpenAI-compatible engine.

    URL is the engine, such as http://localhost:8000. It should serve no other requests meanwhile.
    Prompts are random token ids, so its prefix cache has no effect but where one is measured: for
    new tokens after a prefix that was sent before, as in the turns of a conversation. Do not reuse
    a seed: its prompts are in the cache.

    \b
    Examples:
      prfaas profile http://localhost:8000 --model m --hardware 8xH200 --out h200.toml
      prfaas profile URL --model m --hardware 8xH20 --batches 1,8,32 --out h20.toml
    """
    if len(lengths) < 2:
        raise ConfigError(f"--lengths has {len(lengths)} value; a curve needs at least 2")
    if seed is None:
        seed = random.SystemRandom().randrange(2**32)
    from prfaas.cli.plan.profile_actions import Sweep, measure_engine

    longest = lengths[-1]
    sweep = Sweep(
        url=url,
        lengths=lengths,
        prefixes=(longest // 4, longest * 3 // 4) if prefixes is None else prefixes,
        needs_prefixes=prefixes is not None,
        new_tokens=new_tokens or (max(longest // 32, 1), max(longest // 8, 1)),
        seed=seed,
        **settings,
    )
    measure_engine(sweep, out)
