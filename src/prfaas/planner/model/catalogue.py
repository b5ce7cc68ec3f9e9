"""Models and accelerators of the catalogue."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType

import msgspec

from prfaas.errors import ConfigError


def nearest(name: str, valid: Iterable[str]) -> str:
    """ "; did you mean 'x'?" or "" when nothing comes close."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


class CatalogueModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A public model: the fields of its `config.json` that matter here, and their source."""

    name: str
    """As its publisher writes it."""
    source: str
    """Place where the config fields were read."""
    parameters: float
    active_parameters: float
    """Weights that one token uses."""
    parameters_source: str
    """Origin of the two counts."""
    config: dict[str, object]
    """Fields of `config.json`."""


class Accelerator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Peak figures of one accelerator."""

    name: str
    bf16_flop_per_s: float
    """Dense bf16 tensor throughput."""
    fp8_flop_per_s: float
    """Dense fp8 tensor throughput."""
    memory_bytes_per_s: float
    memory_bytes: float
    source: str


def _load(name: str) -> dict[str, object]:
    text = resources.files("prfaas.planner").joinpath("data", name).read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def models() -> Mapping[str, CatalogueModel]:
    """Catalogue key -> model."""
    return MappingProxyType(msgspec.convert(_load("models.toml"), dict[str, CatalogueModel]))


@cache
def accelerators() -> Mapping[str, Accelerator]:
    """Catalogue key -> accelerator."""
    return MappingProxyType(msgspec.convert(_load("accelerators.toml"), dict[str, Accelerator]))


def find_model(key: str) -> CatalogueModel:
    """A model by its catalogue key or its name, in any case.

    Raises:
        ConfigError: There is no such model; the message names the nearest.
    """
    by_name = {m.name.lower(): m for m in models().values()}
    found = models().get(key) or by_name.get(key.lower())
    if found is None:
        raise ConfigError(
            f"model {key!r} is not in the catalogue{nearest(key, [*models(), *by_name])}; "
            "`prfaas model --list` shows all, or give the path of a config.json"
        )
    return found


def find_accelerator(key: str) -> Accelerator:
    """An accelerator by its catalogue key; ConfigError if there is no such accelerator."""
    found = accelerators().get(key.lower())
    if found is None:
        known = ", ".join(accelerators())
        raise ConfigError(f"accelerator {key!r} is not in the catalogue; known: {known}")
    return found
