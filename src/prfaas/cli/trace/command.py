"""`prfaas trace`: recorded workloads for plans and simulations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from prfaas.cli.common.options import DURATION, FILE, FOLDER, TRACE, ParsedType
from prfaas.errors import ConfigError

_FORMATS = ("mooncake", "azure", "burstgpt", "servegen", "chats")


def _share(text: str) -> float:
    try:
        found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        found = -1.0
    if not 0 <= found < 1:
        raise ConfigError(f"{text!r} is not a share from 0% to less than 100%")
    return found


@click.group()
def trace() -> None:
    """Recorded workloads for plans and simulations: import and inspect them.

    \b
    Examples:
      prfaas trace show examples/sim/traces/mooncake_conversation.jsonl.gz
      prfaas trace import BurstGPT_1.csv --out burstgpt.jsonl.gz
      prfaas trace import chats.jsonl --out sessions.jsonl.gz --chars-per-token 4
    """


@trace.command("import")
@click.argument("file", type=TRACE)
@click.option("--out", type=FILE, required=True, help="File to write: .jsonl or .jsonl.gz.")
@click.option("--from", "form", type=click.Choice(_FORMATS), help="Format; detected if absent.")
@click.option("--start", type=DURATION, help="Start of the part after the earliest request.")
@click.option("--duration", type=DURATION, help="Length of the part.")
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    help="Keep only the earliest requests, up to this number.",
)
@click.option(
    "--block-tokens",
    type=click.IntRange(1, 2**20),
    default=512,
    help="Tokens per block of Mooncake's hash_ids.",
)
@click.option(
    "--timestamps",
    "unit",
    type=click.Choice(["s", "ms"]),
    help="Unit of timestamps in Mooncake's schema; ms if absent.",
)
@click.option(
    "--damaged-max",
    type=ParsedType("share", _share),
    default="1%",
    help="Refuse a file with a larger share of damaged lines.",
)
@click.option(
    "--tokenizer",
    type=FOLDER,
    help="Chats: directory of a model's tokenizer.json, for lengths in its tokens.",
)
@click.option(
    "--chars-per-token",
    type=click.FloatRange(0.25, 64),
    help="Chats: characters per token, in place of a tokenizer.",
)
@click.option(
    "--pause",
    "pause_ns",
    type=DURATION,
    default="10s",
    help="Chats: pause before a turn if none is recorded.",
)
@click.option("--force", "overwrite", is_flag=True, help="Replace the file to write.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def import_(
    *, start: int | None, duration: int | None, requests: int | None, as_json: bool, **given: Any
) -> None:
    """Write a trace in the form that plans and simulations read.

    FILE is a trace of Mooncake (with or without hash_ids), Azure (2023, 2024), BurstGPT, ServeGen,
    or chat transcripts: JSON lines of messages, which become sessions. It may be packed with gzip,
    bzip2 or xz. Damaged lines are dropped and counted by reason. For chats, only lengths and
    numbers of common blocks are written, no text. See docs/workloads.md.

    \b
    Examples:
      prfaas trace import AzureLLMInferenceTrace_conv_1week.csv --out day.jsonl.gz --duration 24h
      prfaas trace import BurstGPT_1.csv --out burstgpt.jsonl.gz --start 48h --duration 1h
      prfaas trace import mooncake.jsonl --out part.jsonl --requests 5000 --damaged-max 0%
      prfaas trace import chats.jsonl.gz --out sessions.jsonl.gz --tokenizer ./my-model
      prfaas trace import chats.jsonl --out sessions.jsonl.gz --chars-per-token 3.6 --pause 30s
    """
    if given["tokenizer"] is not None and given["chars_per_token"] is not None:
        raise click.UsageError("give --tokenizer or --chars-per-token, not both")
    from prfaas.cli.trace.actions import Import
    from prfaas.traces.reader import TracePart

    part = TracePart(start or 0, duration, requests)
    Import(part=part, **given).run(as_json=as_json)


@trace.command()
@click.argument("file", type=TRACE)
@click.option(
    "--block-tokens",
    type=click.IntRange(1, 2**20),
    default=512,
    help="Tokens per block of Mooncake's hash_ids.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(*, file: Path, block_tokens: int, as_json: bool) -> None:
    """Show requests, span, rate, bursts, lengths and common prefixes of a trace.

    FILE is in any format that plans and simulations read.

    \b
    Examples:
      prfaas trace show examples/sim/traces/azure_code_2023.csv.gz
      prfaas trace show sessions.jsonl.gz --json
    """
    from prfaas.cli.trace.actions import show_trace

    show_trace(file, block_tokens, as_json=as_json)
