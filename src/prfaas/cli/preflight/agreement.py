"""Arguments and environment of vLLM engines that have to agree before they can share blocks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from prfaas.cli.preflight.vllm_flags import given, vllm_engines
from prfaas.config.clusters import EngineTable
from prfaas.config.deployment import Deployment
from prfaas.config.engines.block_tokens import common_length
from prfaas.config.engines.cores import runs_on_cpu
from prfaas.engines.identity import variables
from prfaas.engines.launch import HASH_SEED
from prfaas.errors import ConfigError

_RANKS, _BLOCKS = "--tensor-parallel-size", "PRFAAS_BLOCKS"
_BLOCK_SIZE = "--block-size"
_DEFAULTS = {
    "--revision": "",
    "--tokenizer": "",
    "--block-size": "",
    "--mamba-block-size": "",
    "--prefix-match-unit": "",
    "--dtype": "auto",
    "--kv-cache-dtype": "auto",
    "--kv-cache-dtype-skip-layers": "",
    "--mamba-cache-dtype": "auto",
    "--mamba-ssm-cache-dtype": "auto",
    "--quantization": "",
    "--quantization-config": "",
    "--load-format": "auto",
    "--model-impl": "auto",
    "--hf-overrides": "",
    "--tensor-parallel-size": "1",
    "--pipeline-parallel-size": "1",
    "--prefill-context-parallel-size": "1",
    "--decode-context-parallel-size": "1",
    "--disable-sliding-window": "no",
    "--disable-hybrid-kv-cache-manager": "no",
    "--language-model-only": "no",
    "--mm-processor-kwargs": "",
    "--speculative-config": "",
    _BLOCKS: "",
    "VLLM_KV_CACHE_LAYOUT": "",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": "",
    "VLLM_MLA_DISABLE": "",
    "VLLM_USE_V2_MODEL_RUNNER": "",
    "PYTHONHASHSEED": HASH_SEED,
} | dict.fromkeys(variables.COUNTED, "")
"""Compared arguments in addition to `--model`, with their defaults; "" is vLLM's choice."""
_SAMPLING = ("--generation-config", "--override-generation-config", "--logits-processors")
"""Arguments that choose tokens where a request does not say how."""
_UNSURE = {"", "auto"}
"""Values that the engine resolves, possibly to the other one's value."""


class Disagreement(NamedTuple):
    """A setting that differs between engines."""

    setting: str
    values: Mapping[str, str]
    """By engine; "" is not given."""
    is_converted: bool = False
    """Pool nodes convert blocks between engines with these values."""

    @property
    def is_certain(self) -> bool:
        """Return True if two engines have values that cannot resolve to the same."""
        return not self.is_converted and len(set(self.values.values()) - _UNSURE) > 1

    @property
    def words(self) -> str:
        """The setting with its value at each engine."""
        shown = ", ".join(f"{value or 'not given'} at {n}" for n, value in self.values.items())
        if self.setting == _BLOCK_SIZE and not self.is_converted:
            shown += f" ({common_length(self.values.values())})"
        return f"{self.setting}: {shown}"


def disagreements(deployment: Deployment) -> list[Disagreement]:
    """Return the settings that differ between vLLM engines which are started here."""
    engines = {
        name: _settings(deployment.model.path, engine)
        for _, name, engine in vllm_engines(deployment)
    }
    names = dict.fromkeys(name for settings in engines.values() for name in settings)
    converted = {_RANKS} if _convert(engines.values()) else set()
    if deployment.model.block_tokens is not None:
        converted.add(_BLOCK_SIZE)
    found = (
        Disagreement(
            name,
            {e: s.get(name, _default(name)) for e, s in engines.items()},
            is_converted=name in converted,
        )
        for name in names
    )
    return [each for each in found if len(set(each.values.values())) > 1]


def _convert(engines: Iterable[Mapping[str, str]]) -> bool:
    """Return True if the blocks of all engines are canonical."""
    return all(each[_BLOCKS] == "canonical" for each in engines)


def check_agreement(deployment: Deployment) -> None:
    """Refuse a deployment whose engines cannot share a single block; ConfigError if two engines
    have different values."""
    certain = [each.words for each in disagreements(deployment) if each.is_certain]
    if certain:
        raise ConfigError(
            "engines have different settings, and nothing would be offloaded between them "
            f"(layout_mismatch): {'; '.join(certain)}; give all the same"
        )


def uncertain(deployment: Deployment) -> Iterator[str]:
    """Yield a line for every setting that one engine has and another may resolve to the same."""
    for each in disagreements(deployment):
        if each.is_converted:
            yield (
                f"{each.words}: pool nodes convert blocks between them; an engine whose blocks "
                "cannot be converted logs the reason, and nothing is offloaded (layout_mismatch)"
            )
        elif not each.is_certain:
            yield f"{each.words}: if the values differ, nothing is offloaded"


def unlike_samplers(deployment: Deployment) -> Iterator[str]:
    """Yield a line if engines would choose the first tokens of an answer and the others by
    different rules."""
    if deployment.routing.early_first_token == "off":  # noqa: S105 (no password)
        return
    engines = {name: engine.args for _, name, engine in vllm_engines(deployment)}
    for setting in _SAMPLING:
        values = {
            name: " ".join(each.value for each in given(args) if each.name.startswith(setting))
            for name, args in engines.items()
        }
        if len(set(values.values())) > 1:
            yield (
                f"{Disagreement(setting, values).words}: the engine that prefills chooses the "
                "first tokens of an answer, the one that decodes the others; give all the same, or "
                'set routing.early_first_token = "off"'
            )


def certain(deployment: Deployment) -> Iterator[str]:
    """Yield a line for every setting that keeps engines from sharing blocks."""
    for each in disagreements(deployment):
        if each.is_certain:
            yield f"{each.words}: nothing is offloaded between these engines (layout_mismatch)"


def _default(name: str) -> str:
    return _DEFAULTS.get(name.partition(".")[0], "")


def _settings(model: str, engine: EngineTable) -> dict[str, str]:
    """Settings that count, as the engine will have them."""
    settings = {"--model": model, "--dtype": "bfloat16" if runs_on_cpu() else "auto"}
    for each in given(engine.args):
        name = each.name.partition(".")[0]
        if name == "--model" or name in _DEFAULTS:
            settings |= _leaves(each.name, each.value)
    # As `engines/canonical/vllm_rows.py` has it: the blocks of one rank are canonical.
    settings[_BLOCKS] = "canonical" if settings.get(_RANKS, "1") == "1" else "ranks"
    return settings | {name: engine.env[name] for name in _DEFAULTS if name in engine.env}


def _leaves(name: str, value: str) -> dict[str, str]:
    """The leaves of a JSON object with dotted names; other values unchanged."""
    try:
        found = json.loads(value)
    except ValueError:
        return {name: value}
    if not isinstance(found, dict):
        return {name: json.dumps(found) if isinstance(found, list | bool) else value}
    leaves: dict[str, str] = {}
    for key, inner in found.items():
        text = inner if isinstance(inner, str) else json.dumps(inner, sort_keys=True)
        leaves |= _leaves(f"{name}.{key}", text)
    return leaves
