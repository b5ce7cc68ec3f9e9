"""Quality classes of a deployment, for `prfaas check`: who has one, and what groups make of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from prfaas.cli.preflight.vllm_flags import given, vllm_engines
from prfaas.config.deployment import Deployment
from prfaas.core.codec.codecs import Form, LinkCodec, Quality, form_of
from prfaas.core.kv.blocks import CacheGroup, GroupKind, KvPage, Plane
from prfaas.engines.canonical.vllm_pages import KEY_THEN_VALUE
from prfaas.errors import ConfigError

if TYPE_CHECKING:
    from prfaas.planner.model.kv_geometry import KvGeometry, LayerGroup

_TOKENS = 32
_BACKEND, _DTYPE = "--attention-backend", "--kv-cache-dtype"


def lossy_classes(deployment: Deployment) -> dict[Quality, list[str]]:
    """Return the lossy classes in use, with the tables that name them."""
    found: dict[Quality, list[str]] = {}
    named = [(f"tenants.{name}", table.quality) for name, table in deployment.tenants.items()]
    tables = deployment.classes.items()
    named += [(f"classes.{name}", table.quality) for name, table in tables if table.quality]
    for place, quality in named:
        if quality.is_lossy:
            found.setdefault(quality, []).append(place)
    return found


def check_quality(deployment: Deployment) -> None:
    """Refuse a lossy class that no link can carry, or that a cache group of the model cannot take.

    Raises:
        ConfigError: With the group and the reason.
    """
    for quality, places in lossy_classes(deployment).items():
        pools = [pool for table in deployment.clusters.values() for pool in table.pools.items()]
        for name, pool in pools:
            if pool.link_codec is LinkCodec.RAW:
                raise ConfigError(
                    f"{places[0]}.quality: {quality} needs codecs on links, and pool node {name} "
                    'has link_codec = "raw"; set "auto", or the class to "lossless"'
                )
        for engine, groups in _groups(deployment).items():
            for group, found in groups:
                refused = form_of(found, quality)
                if not isinstance(refused, Form) and not refused.is_meant:
                    raise ConfigError(
                        f"{places[0]}.quality: {quality} cannot be taken by the {group} of "
                        f"{engine}: {refused.reason}; {_advice(found, quality)}"
                    )


def _advice(group: CacheGroup, quality: Quality) -> str:
    if "told apart" in str(form_of(group, quality)):
        known = ", ".join(sorted(KEY_THEN_VALUE))
        return f"use fp8, or for attention other than MLA {_BACKEND} with one of {known}"
    return "use another class"


def quality_lines(deployment: Deployment) -> Iterator[str]:
    """Lossy classes, and for each what becomes of the blocks of each cache group."""
    engines = _groups(deployment)
    for quality, places in lossy_classes(deployment).items():
        if not engines:
            yield (
                f"quality: {quality} of {', '.join(places)}; the model's cache groups are not "
                "known here: pool nodes log a group that stays as it is (group_not_rounded)"
            )
        for engine, groups in engines.items():
            shown = (f"{name} {_becomes(group, quality)}" for name, group in groups)
            yield f"quality: {quality} of {', '.join(places)} at {engine}: {'; '.join(shown)}"


def _becomes(group: CacheGroup, quality: Quality) -> str:
    found = form_of(group, quality)
    if isinstance(found, Form):
        return f"rounded {found.decoded_bytes / found.coded_bytes:.2f}:1"
    return f"as it is ({found.reason})"


def _groups(deployment: Deployment) -> dict[str, list[tuple[str, CacheGroup]]]:
    """Return the kinds of layers of each vLLM engine started here, as blocks of a few tokens."""
    return {
        f"clusters.{cluster}.engines.{name}": found
        for cluster, name, engine in vllm_engines(deployment)
        if (found := _of_engine(deployment, {each.name: each.value for each in given(engine.args)}))
    }


def _of_engine(deployment: Deployment, args: Mapping[str, str]) -> list[tuple[str, CacheGroup]]:
    # The planner takes a second to import.
    from prfaas.planner.answer.plan_loader import read_config_json
    from prfaas.planner.model.hf_config import geometry_from_config

    try:
        config = read_config_json(Path(deployment.model.path) / "config.json")
        geometry = geometry_from_config(config, kv_dtype=args.get(_DTYPE, "auto"))
    except ConfigError:
        return []
    backend = args.get(_BACKEND, "")
    return [(str(each.kind), _group(each, geometry, backend)) for each in geometry.groups]


def _group(layers: LayerGroup, geometry: KvGeometry, backend: str) -> CacheGroup:
    """Return a group that is coded like one of the engine; only ratios depend on its sizes."""
    from prfaas.planner.model.kv_geometry import LayerKind

    if layers.kind in (LayerKind.LINEAR, LayerKind.SHORT_CONV):
        planes = (Plane(geometry.state_dtype, max(layers.state_bytes, 1)),)
        return CacheGroup(0, GroupKind.LINEAR_STATE, _TOKENS, planes[0].num_bytes, 0, planes)
    cell = layers.token_bytes // 4
    can_tell = backend in KEY_THEN_VALUE and layers.kind in (LayerKind.FULL, LayerKind.SLIDING)
    pages = (KvPage(1, _TOKENS, 1, cell, cell, is_token_major=False),) if can_tell and cell else ()
    num_bytes = pages[0].num_bytes if pages else layers.token_bytes * _TOKENS
    planes = (Plane(geometry.kv_dtype, num_bytes),)
    is_window = layers.kind is LayerKind.SLIDING
    kind = GroupKind.SLIDING_WINDOW if is_window else GroupKind.FULL_ATTENTION
    return CacheGroup(0, kind, _TOKENS, num_bytes, 0, planes, pages)
