"""Actions of `prfaas profile`, in a separate module since imports take most of a second."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import click

from prfaas.errors import ConfigError
from prfaas.planner.hardware.engine_http import HttpEngine
from prfaas.planner.hardware.fit import fit_prefill, profile_toml
from prfaas.planner.hardware.measure import Prompts, measure_decode, measure_prefill


@dataclass(frozen=True, slots=True)
class Sweep:
    """The measurements to make.

    Args:
        url: Base URL of the engine.
        model: Name of the served model.
        hardware: Hardware of the engine, for the provenance.
        lengths: Prompt lengths, tokens, rising.
        repeats: Measurements of each length.
        batches: Batches for decode; empty measures none.
        contexts: Prompt lengths for decode, tokens.
        output_tokens: Output of each decode request, tokens.
        token_id_max: Highest token id in prompts.
        seed: Seed of the prompts.
        api_key: Bearer token, or None.
    """

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


def measure_engine(sweep: Sweep, out: Path) -> None:
    """Measure a running engine and write its profile.

    Raises:
        ConfigError: The file cannot be written.
        EngineError: The engine fails.
    """
    try:
        out.touch()
        text, quality = asyncio.run(_measure(sweep))
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from None
    click.echo(quality)
    click.echo(f"wrote {out}")


async def _measure(sweep: Sweep) -> tuple[str, str]:
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
