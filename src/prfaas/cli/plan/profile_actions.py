"""Actions of `prfaas profile`, in a separate module since imports take most of a second."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import click

from prfaas.errors import ConfigError, EngineError
from prfaas.planner.hardware.fit import (
    LayerStack,
    ResumedFit,
    fit_prefill,
    fit_resumed,
    profile_toml,
)
from prfaas.planner.hardware.measure import (
    HttpEngine,
    MeasuredPoint,
    NoPrefixCacheError,
    Prompts,
    measure_decode,
    measure_prefill,
    measure_resumed,
)


@dataclass(frozen=True, slots=True)
class Sweep:
    """The measurements to make.

    Args:
        urls: Base URL of the engine; with `stack` of both.
        stack: Layers of the engines and of the whole model; None for engines that have all.
        model: Name of the served model.
        hardware: Hardware of the engine, for the provenance.
        lengths: Prompt lengths, tokens, rising.
        prefixes: Cached prefixes, tokens, rising; empty measures none.
        needs_prefixes: An engine that does not keep them is an error, else a line of the output.
        new_tokens: Tokens after each of them.
        repeats: Measurements of each length.
        batches: Batches for decode; empty measures none.
        contexts: Prompt lengths for decode, tokens.
        output_tokens: Output of each decode request, tokens.
        token_id_max: Highest token id in prompts.
        api_key: Bearer token, or None.
    """

    urls: tuple[str, ...]
    stack: LayerStack | None
    model: str
    hardware: str
    lengths: tuple[int, ...]
    prefixes: tuple[int, ...]
    needs_prefixes: bool
    new_tokens: tuple[int, ...]
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


@dataclass(frozen=True, slots=True)
class _Times:
    """Measurements of one engine.

    Args:
        prefill: A sample for each length.
        resumed: A row for each prefix, a sample for each new length.
        decode: A row for each batch; empty if decode was not measured.
    """

    version: str
    prefill: list[MeasuredPoint]
    resumed: list[list[MeasuredPoint]]
    decode: list[list[MeasuredPoint]]


async def _measure(sweep: Sweep) -> tuple[str, str]:
    """The profile file, and the quality of the prefill curve in words."""
    prompts = Prompts(random.Random(sweep.seed), sweep.token_id_max)  # noqa: S311
    found = []
    async with aiohttp.ClientSession() as session:
        for index, url in enumerate(sweep.urls):
            if sweep.stack is not None:
                layers = (sweep.stack.few, sweep.stack.more)[index]
                click.echo(f"{url}, {layers} layers:")
            engine = HttpEngine(session, url, sweep.model, sweep.api_key)
            found.append(await _times(engine, prompts, sweep))
    times = found[0] if sweep.stack is None else _stacked(sweep.stack, *found)
    fit = fit_prefill(times.prefill)
    lengths = [sample.x for sample in times.prefill]
    try:
        resumed = fit_resumed(fit, lengths, times.resumed, sweep.prefixes, sweep.new_tokens)
    except NoPrefixCacheError as error:
        resumed = ResumedFit()
        _without_prefixes(sweep, error)
    source = (
        f"prfaas profile, {datetime.now(UTC):%Y-%m-%d}, {sweep.model} on {sweep.hardware}, engine "
        f"{times.version}, median of {sweep.repeats} after a warm-up, seed {sweep.seed}"
    )
    if sweep.stack is not None:
        stack = sweep.stack
        source += f"; extrapolated to {stack.whole} layers from {stack.few} and {stack.more}"
    decode = times.decode or None
    text = profile_toml(source, times.prefill, fit, resumed, decode, list(sweep.contexts))
    return text, fit.words() + resumed.words()


async def _times(engine: HttpEngine, prompts: Prompts, sweep: Sweep) -> _Times:
    version = await engine.version()
    prefill = await measure_prefill(
        engine, prompts, sweep.lengths, sweep.repeats, report=click.echo
    )
    resumed: list[list[MeasuredPoint]] = []
    try:
        resumed = await measure_resumed(
            engine,
            prompts,
            prefixes=sweep.prefixes,
            new_tokens=sweep.new_tokens,
            repeats=sweep.repeats,
            report=click.echo,
        )
    except NoPrefixCacheError as error:
        _without_prefixes(sweep, error)
    decode: list[list[MeasuredPoint]] = []
    if sweep.batches:
        decode = await measure_decode(
            engine,
            prompts,
            batches=sweep.batches,
            contexts=sweep.contexts,
            num_tokens=sweep.output_tokens,
            report=click.echo,
        )
    return _Times(version, prefill, resumed, decode)


def _without_prefixes(sweep: Sweep, error: NoPrefixCacheError) -> None:
    """Go on without resumed prefills, unless they were asked for."""
    if sweep.needs_prefixes:
        raise error
    click.echo(f"times after a cached prefix follow from the cold ones: {error}")


def _stacked(stack: LayerStack, few: _Times, more: _Times) -> _Times:
    """Times of the whole model; EngineError if the engines differ in more than their layers."""
    if few.version != more.version:
        raise EngineError(
            f"the engines are {few.version} and {more.version}; they may differ in layers only"
        )
    decode = [stack.whole_samples(*rows) for rows in zip(few.decode, more.decode, strict=True)]
    # Empty if one of them keeps no prefixes.
    pairs = zip(few.resumed, more.resumed, strict=False)
    resumed = [stack.whole_samples(*rows) for rows in pairs]
    prefill = stack.whole_samples(few.prefill, more.prefill)
    return _Times(few.version, prefill, resumed, decode)
