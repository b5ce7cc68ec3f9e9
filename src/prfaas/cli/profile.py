"""`prfaas profile`: measure a running engine."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import click

from prfaas.errors import ConfigError
from prfaas.planner.engine_http import HttpEngine
from prfaas.planner.fit import fit_prefill, profile_toml
from prfaas.planner.measure import Prompts, measure_decode, measure_prefill


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


@dataclass(frozen=True, slots=True)
class _Sweep:
    url: str
    model: str
    hardware: str
    lengths: tuple[int, ...]
    repeats: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    output_tokens: int
    token_id_max: int
    seed: int
    api_key: str | None


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
    sweep = _Sweep(
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
    try:
        out.touch()
        text, quality = asyncio.run(_measure(sweep))
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from None
    click.echo(quality)
    click.echo(f"wrote {out}")


async def _measure(sweep: _Sweep) -> tuple[str, str]:
    """The profile file, and the quality of the prefill curve in words."""
    prompts = Prompts(random.Random(sweep.seed), sweep.token_id_max)  # noqa: S311
    async with aiohttp.ClientSession() as session:
        engine = HttpEngine(session, sweep.url, sweep.model, sweep.api_key)
        version = await engine.version()
        samples = await measure_prefill(
            engine, prompts, sweep.lengths, sweep.repeats, report=click.echo
        )
        decode = None
        if sweep.batches:
            decode = await measure_decode(
                engine,
                prompts,
                batches=sweep.batches,
                contexts=sweep.contexts,
                num_tokens=sweep.output_tokens,
                report=click.echo,
            )
    fit = fit_prefill(samples)
    source = (
        f"prfaas profile, {datetime.now(UTC):%Y-%m-%d}, {sweep.model} on {sweep.hardware}, engine "
        f"{version}, median of {sweep.repeats} after a warm-up, seed {sweep.seed}"
    )
    return profile_toml(source, samples, fit, decode, list(sweep.contexts)), fit.words()
