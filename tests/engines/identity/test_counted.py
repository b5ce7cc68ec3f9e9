"""Every field of vLLM's configuration is a fact, is in another one, or is known not to matter."""

import dataclasses
import inspect
from collections.abc import Iterable
from typing import Any

import pytest

from prfaas.engines.identity import variables
from prfaas.engines.identity.counted import (
    COUNTED,
    ELSEWHERE,
    NOT_COUNTED,
    ONLY_IN,
    SPEC_NOT_COUNTED,
)
from prfaas.engines.vllm_compat import VERSIONS, minor_of
from tests.engines.vllm_modules import needing_vllm

pytestmark = pytest.mark.timeout(180)

OBJECTS = {
    "model_config": "ModelConfig",
    "cache_config": "CacheConfig",
    "parallel_config": "ParallelConfig",
    "speculative_config": "SpeculativeConfig",
    "multimodal_config": "MultiModalConfig",
    "load_config": "LoadConfig",
    "mamba_config": "MambaConfig",
    "attention_config": "AttentionConfig",
    "scheduler_config": "SchedulerConfig",
    "vllm_config": "VllmConfig",
}


def tables(name: str) -> list[set[str]]:
    return [
        set(COUNTED.get(name, ())),
        set(ELSEWHERE.get(name, {})),
        set(NOT_COUNTED.get(name, {})),
    ]


def of_other_versions(name: str) -> set[str]:
    """Fields that this vLLM lacks because another supported version has them alone."""
    minor = minor_of(needing_vllm("vllm").__version__)
    others = [fields for version, fields in ONLY_IN.items() if version != minor]
    return {field for fields in others for field in fields.get(name, ())}


def unknown_fields(name: str, kind: Any) -> set[str]:
    """Fields of a configuration object about which nobody has decided."""
    return {field.name for field in dataclasses.fields(kind)} - set().union(*tables(name))


@pytest.mark.parametrize(("name", "kind"), OBJECTS.items())
def test_every_field_of_vllms_configuration_is_decided_on(name: str, kind: str) -> None:
    found = getattr(needing_vllm("vllm.config"), kind)
    assert unknown_fields(name, found) == set(), (
        f"{kind} of this vLLM has fields that may change the bytes of a block: put each into "
        "COUNTED, or into ELSEWHERE or NOT_COUNTED with the reason (engines/identity/counted.py)"
    )


@pytest.mark.parametrize(("name", "kind"), OBJECTS.items())
def test_no_decision_is_about_a_field_that_is_not_there(name: str, kind: str) -> None:
    fields = {f.name for f in dataclasses.fields(getattr(needing_vllm("vllm.config"), kind))}
    assert set().union(*tables(name)) - fields == of_other_versions(name)


@pytest.mark.parametrize("name", OBJECTS)
def test_a_field_is_decided_on_once(name: str) -> None:
    counted, elsewhere, ignored = tables(name)
    overlap = (counted & ignored) | (elsewhere & ignored) | (counted & elsewhere)
    assert overlap == set()


def undecided_variables(names: Iterable[str]) -> set[str]:
    """Environment variables about which nobody has decided."""
    ignored = {name for listed in variables.NOT_COUNTED.values() for name in listed.split()}
    counted = {*variables.COUNTED, *later_variables()}
    return set(names) - {*counted, *variables.ELSEWHERE, *ignored}


def later_variables() -> list[str]:
    return [name for names in variables.COUNTED_SINCE.values() for name in names]


def test_every_environment_variable_of_vllm_is_decided_on() -> None:
    names = needing_vllm("vllm.envs").environment_variables
    assert undecided_variables(names) == set(), (
        "this vLLM has environment variables that may change the bytes of a block: put each into a "
        "table of engines/identity/variables.py"
    )
    assert undecided_variables([*names, "VLLM_NEW_QUANT"]) == {"VLLM_NEW_QUANT"}


def test_a_variable_is_decided_on_once_and_is_there() -> None:
    names = needing_vllm("vllm.envs").environment_variables
    listed = [name for text in variables.NOT_COUNTED.values() for name in text.split()]
    decided = [*variables.COUNTED, *later_variables(), *variables.ELSEWHERE, *listed]
    assert len(decided) == len(set(decided))
    minor = minor_of(needing_vllm("vllm").__version__)
    others = {
        name for only, text in variables.ONLY_IN.items() if only != minor for name in text.split()
    }
    assert set(decided) - set(names) == others
    assert set(variables.ONLY_IN) <= set(VERSIONS)


def test_a_new_field_is_noticed() -> None:
    kind = needing_vllm("vllm.config").CacheConfig
    newer = dataclasses.make_dataclass("Newer", [("scale_format", str, "")], bases=(kind,))
    assert unknown_fields("cache_config", newer) == {"scale_format"}
    assert set(ONLY_IN) <= set(VERSIONS)


def test_fields_that_do_not_count_have_a_reason() -> None:
    for reasons in (*ELSEWHERE.values(), *NOT_COUNTED.values(), SPEC_NOT_COUNTED):
        for field, reason in reasons.items():
            assert len(reason) > 8, field


def test_fields_of_a_cache_group_that_do_not_count_exist() -> None:
    module = needing_vllm("vllm.v1.kv_cache_interface")
    specs: list[Any] = [
        kind
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, module.KVCacheSpec)
    ]
    fields = {field.name for kind in specs for field in dataclasses.fields(kind)}
    assert set(SPEC_NOT_COUNTED) <= fields


def test_vllms_own_storage_identity_is_in_the_facts() -> None:
    """Of `FileMapper`, which names files of blocks, every part is a fact of ours."""
    ours = {
        "model_name": "model.weights, model.config and so on: bytes, not the name",
        "tokens_per_hash": "tokens_per_hash",
        "blocks_per_file": "none: no files",
        "tp_size": "parallel_config.tensor_parallel_size",
        "pp_size": "parallel_config.pipeline_parallel_size",
        "pcp_size": "parallel_config.prefill_context_parallel_size",
        "dcp_size": "parallel_config.decode_context_parallel_size",
        "rank": "rows: all ranks are in a row",
        "dtype": "cache_config.cache_dtype",
        "kv_cache_groups": "group.*.tokens_per_block, group.*.layers",
        "inference_engine": "engine",
        "parallel_agnostic": "canonical_layout, and the sizes themselves",
        "replicated_layout": "rows, kv_tp_replicas",
        "canonical_format": "canonical_layout, cache_config.kv_cache_layout",
    }
    mapper = needing_vllm("vllm.v1.kv_offload.file_mapper").FileMapper
    parts = set(inspect.signature(mapper.__init__).parameters) - {"self", "root_dir"}
    assert parts == set(ours)
