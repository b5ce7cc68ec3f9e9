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
from prfaas.planner.hardware.fit import ResumedFit, fit_prefill, fit_resumed, profile_toml
from prfaas.planner.hardware.measure import (
    HttpEngine,
    NoPrefixCacheError,
    Prompts,
    measure_decode,
    measure_prefill,
    measure_resumed,
)


@dataclass(frozen=True, slots=True)
class Sweep:
    """The measurements to make."""

    url: str
    model: str
    hardware: str
    lengths: tuple[int, ...]
    prefixes: tuple[int, ...]
    """Cached prefixes, tokens, rising; empty measures none."""
    needs_prefixes: bool
    """An engine that does not keep them is an error, else a line of the output."""
    new_tokens: tuple[int, ...]
    """Tokens after each of them."""
    repeats: int
    batches: tuple[int, ...]
    """Batches for decode; empty measures none."""
    contexts: tuple[int, ...]
    """Prompt lengths for decode, tokens."""
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
    decode, resumed = None, ResumedFit()
    async with aiohttp.ClientSession() as session:
        engine = HttpEngine(session, sweep.url, sweep.model, sweep.api_key)
        version = await engine.version()
        prefill = await measure_prefill(
            engine, prompts, sweep.lengths, sweep.repeats, report=click.echo
        )
        fit, lengths = fit_prefill(prefill), [sample.x for sample in prefill]
        try:
            rows = await measure_resumed(
                engine,
                prompts,
                prefixes=sweep.prefixes,
                new_tokens=sweep.new_tokens,
                repeats=sweep.repeats,
                report=click.echo,
            )
            resumed = fit_resumed(fit, lengths, rows, sweep.prefixes, sweep.new_tokens)
        except NoPrefixCacheError as error:
            if sweep.needs_prefixes:
                raise
            click.echo(f"times after a cached prefix follow from the cold ones: {error}")
        if sweep.batches:
            decode = await measure_decode(
                engine,
                prompts,
                batches=sweep.batches,
                contexts=sweep.contexts,
                num_tokens=sweep.output_tokens,
                report=click.echo,
            )
    source = (
        f"prfaas profile, {datetime.now(UTC):%Y-%m-%d}, {sweep.model} on {sweep.hardware}, engine "
        f"{version}, median of {sweep.repeats} after a warm-up, seed {sweep.seed}"
    )
    text = profile_toml(source, prefill, fit, resumed, decode, list(sweep.contexts))
    return text, fit.words() + resumed.words()
