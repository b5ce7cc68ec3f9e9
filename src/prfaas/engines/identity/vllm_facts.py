"""The facts of a vLLM engine, read from its effective configuration in the scheduler process.

Effective is what vLLM runs with: the model's configuration after `--hf-overrides`, dtypes after
`auto`, and the physical layout of the cache after backends and environment had their say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from prfaas.core.kv.blocks import FACTS_MAX, HashScheme, Layout
from prfaas.core.kv.canonical.parts import LayerParts
from prfaas.engines.canonical.vllm_parts import KernelPages
from prfaas.engines.identity import variables
from prfaas.engines.identity.checkpoint_files import (
    FileDigests,
    checkpoint_digests,
    find_checkpoint,
)
from prfaas.engines.identity.counted import COUNTED, SPEC_NOT_COUNTED
from prfaas.engines.identity.values import digest, flat, name_of, text_of, words_of
from prfaas.engines.vllm_compat import attention_isa
from prfaas.errors import ConfigError

RULES = "6"
"""Version of the rules for facts; ids of other versions never match."""
_GUESSERS = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Drafting methods without a model, which keep no cache."""
BLOCKS_CANONICAL = "canonical 1"
"""Blocks in the order of `core/kv/canonical/parts.py`, and the version of that order."""
OF_RANKS = frozenset(
    {"parallel_config.tensor_parallel_size", "parallel_config.world_size", "kv_tp_replicas"}
)
"""Facts of rows that canonical blocks do not depend on."""
_OF_ROWS = frozenset({"block_size", "num_kv_heads", "num_head_slots", "max_tp_shards", "shapes"})
"""Fields of a cache group with the shapes of one rank or one page of the engine; `parts` has those
of a block."""
_COMMON_LOADERS = frozenset({"auto", "hf", "safetensors", "mistral", "dummy", "instanttensor"})
_CAUSES = frozenset({"spec", "dtype", "dtypes", "kv_quant_mode", "shapes"})
"""Fields of a cache group that others follow from."""
_CONFIG_FACTS_MAX = FACTS_MAX // 2
_NOT_OF_THE_MODEL = frozenset({"transformers_version", "name_or_path", "torch_dtype"})

Extents = Mapping[int, list[tuple[int, int]]]


def vllm_facts(
    vllm_config: Any,
    kv_cache_config: Any,
    layout: Layout,
    extents: Extents,
    blocks: str,
    layers: Mapping[int, Sequence[LayerParts]],
    digests: FileDigests | None = None,
    kernels: Mapping[str, KernelPages] = MappingProxyType({}),
) -> tuple[dict[str, str], str]:
    """Return the facts of an engine, the most telling first, and its model in words; ConfigError if
    two engines with these facts could have different bytes.

    Args:
        vllm_config: vLLM's configuration (`VllmConfig`).
        kv_cache_config: Its cache groups (`KVCacheConfig`).
        layout: The cache groups as they are announced; its id is not read.
        extents: Offset and length, bytes, of a row's parts, by group.
        blocks: BLOCKS_CANONICAL, or why blocks are those of the engine's ranks.
        layers: Parts of the layers of canonical blocks, by group; empty if they are of ranks.
        digests: Digests of files; None takes those that are kept for this user.
        kernels: Kernel blocks of pages, by layer, as the ranks report them.
    """
    _refuse_unknowable(vllm_config)
    digests = FileDigests() if digests is None else digests
    model, words = _model(vllm_config, digests)
    # Causes come before what follows from them: the first facts that differ are shown.
    facts = model | {"blocks": words_of(blocks)} | _fields(vllm_config) | _caches(vllm_config)
    facts |= _config("config", vllm_config.model_config.hf_config)
    facts |= _draft(vllm_config, digests)
    digests.progress.log_summary()
    facts |= _groups(kv_cache_config, layout, layers)
    facts |= _engine(vllm_config, kv_cache_config) | _variables()
    if layers:
        facts = {name: value for name, value in facts.items() if name not in OF_RANKS}
    else:
        facts |= _kernels(kv_cache_config, layout, kernels)
        facts["rows"] = digest(sorted(extents.items()))
    if len(facts) > FACTS_MAX:
        names = list(facts)[FACTS_MAX - 1 :]
        rest = digest({name: facts.pop(name) for name in names})
        facts["rest"] = rest
    return facts, words_of(words)


def _refuse_unknowable(vllm_config: Any) -> None:
    if vllm_config.weight_transfer_config is not None:
        raise ConfigError(
            "weights that are replaced while the engine runs would leave blocks of the old ones; "
            "start the engine without --weight-transfer-config"
        )


# --- bytes ---


def _model(vllm_config: Any, digests: FileDigests) -> tuple[dict[str, str], str]:
    model, load = vllm_config.model_config, vllm_config.load_config
    found, words = _checkpoint(model, load, digests)
    facts = {f"model.{kind}": value for kind, value in found.items()}
    if model.tokenizer and model.tokenizer != model.model:
        directory, _ = find_checkpoint(model.tokenizer, model.tokenizer_revision)
        others = checkpoint_digests(directory, digests, weights=False)
        facts |= {f"tokenizer.{kind}": value for kind, value in others.items()}
    return facts | _remote_code(model), words


def _checkpoint(model: Any, load: Any, digests: FileDigests) -> tuple[dict[str, str], str]:
    """Digests of a model's files; weights may lie in a download directory of their own."""
    if getattr(model, "model_weights", ""):
        raise ConfigError(
            f"the weights of {model.model} are streamed from an object store, and their bytes are "
            "not on this machine to be compared; start the engine with a directory that holds them"
        )
    all_formats = str(load.load_format) not in _COMMON_LOADERS
    directory, words = find_checkpoint(model.model, model.revision)
    found = checkpoint_digests(directory, digests, all_formats=all_formats)
    if load.download_dir:
        apart, _ = find_checkpoint(model.model, model.revision, load.download_dir)
        found |= checkpoint_digests(apart, digests, all_formats=all_formats)
    if "weights" not in found and str(load.load_format) != "dummy":
        raise ConfigError(
            f"{directory} holds no weights (.safetensors, .bin, .pt or .gguf) that could be "
            "compared; start the engine with the directory that holds them"
        )
    return found, words


def _remote_code(model: Any) -> dict[str, str]:
    """Code that the configuration takes from another repository."""
    auto_map = getattr(model.hf_config, "auto_map", None) or {}
    if not model.trust_remote_code:
        return {}
    places = {
        str(part).partition("--")[0]
        for value in auto_map.values()
        for part in (value if isinstance(value, list | tuple) else [value])
        if "--" in str(part)
    }
    if places and not model.code_revision:
        raise ConfigError(
            f"the model's code is taken from {', '.join(sorted(places))}, of any revision in the "
            "cache; pin it with --code-revision COMMIT"
        )
    if not places:
        return {}
    return {"model.remote_code": text_of(f"{','.join(sorted(places))}@{model.code_revision}")}


def _draft(vllm_config: Any, digests: FileDigests) -> dict[str, str]:
    spec = vllm_config.speculative_config
    if spec is None or str(spec.method) in _GUESSERS:
        return {}
    facts = _values("speculative_config", spec)
    draft, main = spec.draft_model_config, vllm_config.model_config
    if draft is None or draft.model == main.model:
        return facts
    found, _ = _checkpoint(draft, spec.draft_load_config or vllm_config.load_config, digests)
    facts |= {f"draft.{kind}": value for kind, value in found.items()}
    return facts | {"draft.hf_config": digest(_plain(draft.hf_config))}


# --- configuration ---


def _fields(vllm_config: Any) -> dict[str, str]:
    """Counted fields of every configuration object that the engine has."""
    objects = {name: getattr(vllm_config, name, None) for name in COUNTED}
    objects["vllm_config"] = vllm_config
    objects["multimodal_config"] = vllm_config.model_config.multimodal_config
    facts: dict[str, str] = {}
    for name, found in objects.items():
        if found is not None and name != "speculative_config":
            facts |= _values(name, found)
    return facts


def _values(prefix: str, found: Any) -> dict[str, str]:
    return {f"{prefix}.{field}": text_of(getattr(found, field)) for field in COUNTED[prefix]}


def _caches(vllm_config: Any) -> dict[str, str]:
    """The cache's dtype after `auto`, and what the rotary embedding takes from the length."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    dtype = cache.cache_dtype
    facts = {"cache_config.cache_dtype": text_of(model.dtype if dtype == "auto" else dtype)}
    kinds = {kind for kind in _rope_kinds(_plain(model.hf_config)) if kind in ("longrope", "su")}
    if kinds:
        # vLLM picks the long or the short factors by it once and for all.
        facts["rope.max_model_len"] = text_of(model.max_model_len)
    return facts


def _rope_kinds(found: Any) -> Iterator[str]:
    if isinstance(found, Mapping):
        for key in ("rope_type", "type"):
            if isinstance(found.get(key), str):
                yield found[key]
        for value in found.values():
            yield from _rope_kinds(value)


def _config(prefix: str, hf_config: Any) -> dict[str, str]:
    """The model's configuration as the engine runs it, a fact a setting."""
    found = {name_of(f"{prefix}.{name}"): value for name, value in flat(_plain(hf_config))}
    names = sorted(found)
    facts = {name: text_of(found[name]) for name in names[:_CONFIG_FACTS_MAX]}
    if len(names) > _CONFIG_FACTS_MAX:
        facts[f"{prefix}.rest"] = digest({n: found[n] for n in names[_CONFIG_FACTS_MAX:]})
    return facts


def _plain(hf_config: Any) -> dict[str, Any]:
    """A configuration as plain data, without the fields that name its file and its reader."""
    found = hf_config.to_dict() if hasattr(hf_config, "to_dict") else vars(hf_config)
    return {k: v for k, v in found.items() if k[:1] != "_" and k not in _NOT_OF_THE_MODEL}


# --- the cache ---


def _groups(
    kv_cache_config: Any, layout: Layout, layers: Mapping[int, Sequence[LayerParts]]
) -> dict[str, str]:
    facts: dict[str, str] = {}
    for group in layout.groups:
        found, at = kv_cache_config.kv_cache_groups[group.index], f"group.{group.index}"
        specs = getattr(found.kv_cache_spec, "kv_cache_specs", None)
        specs = {"": found.kv_cache_spec} if specs is None else specs
        facts |= {
            f"{at}.{name}": value
            for name, value in _merged(specs.items())
            if group.index not in layers or name not in _OF_ROWS
        }
        if group.index in layers:
            facts[f"{at}.parts"] = _parts(layers[group.index])
    facts |= {
        "hash_seed": text_of(layout.hash_seed),
        "num_groups": text_of(len(layout.groups)),
        "tokens_per_hash": text_of(layout.tokens_per_hash),
    }
    if layout.hash_scheme is not HashScheme.SHA256_CBOR:
        # vLLM's own is the default of a fact that is absent (`layout_facts.py`).
        facts["hash_scheme"] = layout.hash_scheme.value
    for group in layout.groups:
        found, at = kv_cache_config.kv_cache_groups[group.index], f"group.{group.index}"
        facts |= {
            f"{at}.kind": text_of(group.kind.value),
            f"{at}.tokens_per_block": text_of(group.tokens_per_block),
            f"{at}.window_tokens": text_of(group.window_tokens),
            f"{at}.block_bytes": text_of(group.block_bytes),
            f"{at}.layers": f"{len(found.layer_names)} {digest(list(found.layer_names))}",
        }
    return facts


def _kernels(
    kv_cache_config: Any, layout: Layout, kernels: Mapping[str, KernelPages]
) -> dict[str, str]:
    """The order of pages that are shipped as they are, of the groups where ranks report it."""
    facts: dict[str, str] = {}
    for group in layout.groups:
        described = kv_cache_config.kv_cache_groups[group.index]
        specs = getattr(described.kv_cache_spec, "kv_cache_specs", {})
        found = {
            name: kernels[name].words_of(specs.get(name, described.kv_cache_spec))
            for name in described.layer_names
            if name in kernels
        }
        if found:
            words = set(found.values())
            one = text_of(words.pop()) if len(words) == 1 else digest(found)
            facts[f"group.{group.index}.kernel_blocks"] = one
    return facts


def _parts(layers: Sequence[LayerParts]) -> str:
    """The parts of the layers of a group: in words where they agree, or a digest over all."""
    words = [", ".join(part.words for part in layer) for layer in layers]
    return text_of(words[0]) if len(set(words)) == 1 else digest(words)


def _merged(specs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """Fields of the layers of a group: one value where they agree, or a digest over all."""
    by_field: dict[str, dict[str, str]] = {}
    for layer, spec in specs:
        by_field.setdefault("spec", {})[layer] = type(spec).__name__
        for field in dataclasses.fields(spec):
            if field.name not in SPEC_NOT_COUNTED:
                value = text_of(getattr(spec, field.name))
                by_field.setdefault(field.name, {})[layer] = value
    for name in sorted(by_field, key=lambda name: name not in _CAUSES):
        by_layer = by_field[name]
        values = set(by_layer.values())
        yield name, values.pop() if len(values) == 1 else digest(by_layer)


def _engine(vllm_config: Any, kv_cache_config: Any) -> dict[str, str]:
    """The engine, and what of its platform changes the bytes of a block."""
    import vllm
    from vllm import envs
    from vllm.platforms import current_platform

    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    facts = {
        "rules": RULES,
        "engine": f"vllm {'.'.join(vllm.__version__.split('.')[:2])}",
        "platform": text_of(vllm_config.device_config.device_type),
        "model_runner": "v2" if vllm_config.use_v2_model_runner else "v1",
        "transformers_backend": text_of(vllm_config.model_config.using_transformers_backend()),
        "canonical_layout": text_of(bool(extra.get("canonical_layout", False))),
        "kv_tp_replicas": text_of(getattr(kv_cache_config, "kv_tp_replicas", 1)),
        "fp8_dtype": text_of(current_platform.fp8_dtype()),
    }
    if current_platform.is_cpu():
        facts["cpu_packing"] = text_of(sorted(cpu_packing(vllm_config, kv_cache_config)))
    if current_platform.is_rocm():
        facts["rocm_shuffled"] = text_of(envs.VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT)
    return facts


def _variables() -> dict[str, str]:
    """Environment variables of vLLM that change bytes beside its configuration."""
    from vllm import envs

    known = envs.environment_variables
    later = [name for names in variables.COUNTED_SINCE.values() for name in names if name in known]
    names = (*variables.COUNTED, *later)
    return {f"env.{name}": text_of(getattr(envs, name)) for name in names}


def cpu_packing(vllm_config: Any, kv_cache_config: Any) -> set[str]:
    """Return the instruction sets that attention on this CPU packs keys for."""
    found = set()
    for group in kv_cache_config.kv_cache_groups:
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec})
        for spec in specs.values():
            if hasattr(spec, "head_size"):
                found.add(attention_isa(spec, vllm_config.cache_config.cache_dtype))
    return found
