"""A model's KV geometry as a table or as JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from prfaas import units as w
from prfaas.errors import ConfigError
from prfaas.planner.answer.plan_file import ProfileFile
from prfaas.planner.answer.plan_loader import prefill_from
from prfaas.planner.hardware.profiles import PrefillProfile
from prfaas.planner.hardware.roofline import ModelSize, Roofline, prefill_profile
from prfaas.planner.model.catalogue import CatalogueModel, find_accelerator
from prfaas.planner.model.kv_geometry import (
    KvGeometry,
    LayerGroup,
    block_kv_bytes,
    hybrid_block_size,
    kv_bytes,
    padded_page_bytes,
    page_bytes,
    shipped_kv_bytes,
)
from prfaas.planner.solve.throughput import kv_throughput
from prfaas.toml_tables import read_toml, validated
from prfaas.units import format_size

_KERNEL_BLOCK_TOKENS = 16  # what vLLM's GPU attention kernels accept
LENGTHS = (1_024, 8_192, 32_768, 131_072)


def load_prefill(path: Path) -> PrefillProfile:
    """The prefill part of a profile file; ConfigError if the file has no profile."""
    table = validated(ProfileFile, read_toml(path), path).prefill
    if table is None:
        raise ConfigError(f"{path} has no [prefill]; measure one with `prfaas profile`")
    return prefill_from(table, path.name)


def roofline_prefill(
    geometry: KvGeometry, size: ModelSize, accelerator: str, *, num_gpus: int, efficiency: float
) -> PrefillProfile:
    """Prefill times of fp8 weights on a roofline; with efficiency 1 no instance is faster."""
    found = find_accelerator(accelerator)
    roofline = Roofline(found, num_gpus, "fp8", efficiency, 1.0, 0.0, "--efficiency")
    name = (
        f"roofline of {num_gpus} x {found.name}, fp8, {efficiency:.0%} of the peak, "
        f"{w.count(size.active_parameters)} active parameters"
    )
    return prefill_profile(name, roofline, geometry, size)


def print_geometry(
    geometry: KvGeometry,
    block_size: int | None,
    times: PrefillProfile | None,
    lengths: Sequence[int],
    console: Console,
) -> None:
    """Write the layer groups, the cache by length, and the KV throughput if times are known."""
    console.print(Text(f"{geometry.name}: KV in {geometry.kv_dtype}", style="bold"))
    console.print(_groups_table(geometry, block_size))
    console.print(_lengths_table(geometry, block_size, times, lengths))
    if block_size:
        page = padded_page_bytes(geometry, block_size)
        console.print(f"One pool of blocks pads every page to {page:,} B.")
        smallest = hybrid_block_size(geometry, _KERNEL_BLOCK_TOKENS)
        if block_size < smallest:
            console.print(f"vLLM would take blocks of at least {smallest} tokens for this model.")
    if times is None:
        hint = "Φ_kv needs prefill times: give --profile, or --active-parameters for a roofline."
        console.print(Text(hint, style="dim"))
    else:
        console.print(Text(f"T_prefill and Φ_kv: {times.name}", style="dim"))


def _groups_table(geometry: KvGeometry, block_size: int | None) -> Table:
    table = Table(header_style="dim")
    columns = ["layers", "kind", "shape", "B per token", "B per state"]
    for column in [*columns, f"B per {block_size}-token page"] if block_size else columns:
        table.add_column(column, justify="left" if column in ("kind", "shape") else "right")
    for group in geometry.groups:
        row = _group_row(group)
        table.add_row(*row, *([f"{page_bytes(group, block_size):,}"] if block_size else []))
    return table


def _group_row(group: LayerGroup) -> list[str]:
    return [
        str(group.num_layers),
        group.kind.value,
        group.detail,
        f"{group.token_bytes:,}" if group.token_bytes else "-",
        f"{group.state_bytes:,}" if group.state_bytes else "-",
    ]


def _lengths_table(
    geometry: KvGeometry,
    block_size: int | None,
    times: PrefillProfile | None,
    lengths: Sequence[int],
) -> Table:
    table = Table(header_style="dim")
    table.add_column("prompt, tokens", justify="right")
    table.add_column("S_kv, B", justify="right")
    table.add_column("S_kv", justify="right")
    if block_size:
        table.add_column("in blocks", justify="right")
        table.add_column("shipped, B", justify="right")
    if times:
        table.add_column("T_prefill", justify="right")
        table.add_column("Φ_kv", justify="right")
    for length in lengths:
        size = kv_bytes(geometry, length)
        row = [f"{length:,}", f"{size:,}", format_size(size)]
        if block_size:
            row.append(format_size(block_kv_bytes(geometry, length, block_size)))
            row.append(f"{shipped_kv_bytes(geometry, length, block_size):,}")
        if times:
            seconds = times.seconds_at(length)
            mark = "" if times.covers(length, length) else " (extrapolated)"
            row += [w.seconds(seconds) + mark, w.bandwidth(kv_throughput(size, seconds))]
        table.add_row(*row)
    return table


def as_dict(
    geometry: KvGeometry,
    block_size: int | None,
    times: PrefillProfile | None,
    lengths: Sequence[int],
) -> dict[str, Any]:
    """Nested dicts, lists and numbers."""
    return {
        "name": geometry.name,
        "kv_dtype": geometry.kv_dtype,
        "state_dtype": geometry.state_dtype,
        "token_bytes": geometry.token_bytes,
        "state_bytes": geometry.state_bytes,
        "groups": [
            {
                "kind": group.kind.value,
                "num_layers": group.num_layers,
                "token_bytes": group.token_bytes,
                "state_bytes": group.state_bytes,
                "window": group.window,
                "detail": group.detail,
                "page_bytes": page_bytes(group, block_size) if block_size else None,
            }
            for group in geometry.groups
        ],
        "padded_page_bytes": padded_page_bytes(geometry, block_size) if block_size else None,
        "prefill_source": times.name if times else None,
        "lengths": [_length(geometry, length, block_size, times) for length in lengths],
    }


def _length(
    geometry: KvGeometry, length: int, block_size: int | None, times: PrefillProfile | None
) -> dict[str, Any]:
    size = kv_bytes(geometry, length)
    found: dict[str, Any] = {"num_tokens": length, "kv_bytes": size}
    if block_size:
        found["shipped_bytes"] = shipped_kv_bytes(geometry, length, block_size)
    if times:
        seconds = times.seconds_at(length)
        found |= {"prefill_s": seconds, "kv_bits_per_s": kv_throughput(size, seconds)}
    return found


def catalogue_table(models: Mapping[str, CatalogueModel]) -> Table:
    """All models of the catalogue with their sources."""
    table = Table(header_style="dim")
    for column in ("key", "name", "source"):
        table.add_column(column, overflow="fold")
    for key, model in models.items():
        table.add_row(key, model.name, model.source)
    return table
