"""`prfaas engine timing`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from prfaas.cli.common.options import NAMED_ADDRESS, PATH, PLAN, logs
from prfaas.cli.common.signals import run_until_stopped
from prfaas.core.kv.blocks import HashScheme
from prfaas.errors import ConfigError
from prfaas.units import parse_size

F = TypeVar("F", bound=Callable[..., Any])


class EventsType(click.ParamType[tuple[str, tuple[str, str | None]]]):
    """`NAME=ENDPOINT[,REPLAY]`."""

    name = "name=endpoint[,replay]"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, tuple[str, str | None]]:
        """Split named ZMQ endpoints."""
        name, _, endpoints = str(value).partition("=")
        publish, _, replay = endpoints.partition(",")
        if not name or "://" not in publish or (replay and "://" not in replay):
            self.fail(f"{value!r} is not NAME=ENDPOINT or NAME=ENDPOINT,REPLAY", param, ctx)
        return name, (publish, replay or None)


_SCALE, _COUNT = click.FloatRange(min=0, min_open=True), click.IntRange(1)


def _preset(
    name: str, kind: click.ParamType[Any] | None, default: object, about: str
) -> Callable[[F], F]:
    """An option with a default, which its help shows."""
    return click.option(name, type=kind, default=default, help=about)


@click.group()
def engine() -> None:
    """Engines that are part of prfaas.

    \b
    Examples:
      prfaas engine timing --engine e0=127.0.0.1:8100 --plan examples/plan/paper-case-study.toml \\
          --model timing-1t --model-path .state/demo-model
    """


@engine.command()
@click.option(
    "--engine",
    "engines",
    type=NAMED_ADDRESS,
    multiple=True,
    required=True,
    help="An instance and its address; several share the process. Those of one address are the "
    "data-parallel ranks of an engine.",
)
@click.option(
    "--plan",
    type=PLAN,
    required=True,
    help="Plan file with the profiles of prefill and decode times.",
)
@click.option("--cluster", help="PrfaaS cluster of the plan; the PD cluster if absent.")
@click.option(
    "--model", required=True, help='Name of the served model; it has to contain "timing".'
)
@click.option("--model-path", required=True, help="Checkpoint; only its tokenizer is read.")
@click.option("--pool", type=PATH, help="Unix socket of the pool node.")
@_preset("--host-memory", None, "64MiB", "Shared with the pool.")
@_preset("--time-scale", _SCALE, 1.0, "Seconds of wall clock per second of the plan.")
@_preset("--bytes-scale", _SCALE, 1.0, "Size of KV blocks, as a share of the model's.")
@_preset("--block-tokens", click.IntRange(16), 512, "Tokens of a KV block.")
@_preset("--cache-tokens", _COUNT, 1_000_000, "Size of each instance's prefix cache, tokens.")
@_preset("--max-model-len", _COUNT, 139_264, "Longest sequence, tokens.")
@_preset("--stream-interval", _COUNT, 1, "Tokens per chunk of a stream, after the first.")
@_preset(
    "--hash-scheme",
    click.Choice([scheme.value for scheme in HashScheme]),
    HashScheme.SHA256_CBOR.value,
    "Names of blocks, and with it the kind of engine: vLLM's, or SGLang's.",
)
@click.option(
    "--kv-events",
    type=EventsType(),
    multiple=True,
    help="Address at which an instance publishes vLLM's KV events over ZMQ, and of their replay.",
)
@logs
def timing(
    *,
    engines: tuple[tuple[str, tuple[str, int]], ...],
    plan: Path,
    cluster: str | None,
    model: str,
    model_path: str,
    pool: Path | None,
    host_memory: str,
    time_scale: float,
    bytes_scale: float,
    block_tokens: int,
    cache_tokens: int,
    max_model_len: int,
    stream_interval: int,
    hash_scheme: HashScheme,
    kv_events: tuple[tuple[str, tuple[str, str | None]], ...],
) -> None:
    """Serve vLLM's or SGLang's HTTP surface over engines that COMPUTE NOTHING.

    Engines wait for the times of the plan's profiles; answers are derived from the prompt, without
    meaning. Prefix cache, KV blocks and their transfers are real: for load tests, failure tests and
    case studies on machines without accelerators.

    \b
    Examples:
      prfaas engine timing --engine e0=127.0.0.1:8100 --plan examples/plan/paper-case-study.toml \\
          --model timing-1t --model-path .state/demo-model --time-scale 0.1
    """
    from prfaas.engines.timing.host import HostSettings, InstanceHost

    for name, _ in kv_events:
        if name not in dict(engines):
            raise ConfigError(f"there is no --engine {name} that could publish KV events")
    settings = HostSettings(
        model=model,
        model_path=model_path,
        plan=plan,
        cluster=cluster,
        engines=dict(engines),
        kv_events=dict(kv_events),
        pool=pool,
        host_memory=parse_size(host_memory),
        time_scale=time_scale,
        bytes_scale=bytes_scale,
        block_tokens=block_tokens,
        cache_tokens=cache_tokens,
        max_model_len=max_model_len,
        stream_interval=stream_interval,
        hash_scheme=HashScheme(hash_scheme),
    )

    async def serve(stop: asyncio.Event) -> None:
        host = InstanceHost(settings)
        try:
            for name, url in (await host.start()).items():
                click.echo(f"timing engine {name} at {url}", err=True)
            await stop.wait()
        finally:
            await host.close()

    run_until_stopped(serve)
