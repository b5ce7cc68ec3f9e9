"""Agreement with kvcache-simulator 0.1.3, model by model; docs/planner.md explains the rest."""

from __future__ import annotations

import pytest

from prfaas.errors import ConfigError
from prfaas.planner.model.hf_config import geometry_from_config
from prfaas.planner.model.kv_geometry import LayerKind, kv_bytes
from tests.planner.public_catalogue import as_config, public_models, their_bytes

MODELS = public_models()
COMPARED = sorted(key for key, model in MODELS.items() if as_config(model) is not None)
REFUSED = sorted(set(MODELS) - set(COMPARED))

# They count indexer keys in the KV dtype; vLLM stores 128 fp8 bytes and 4 bytes of scales.
INDEXED = {"deepseek-v3.2", "glm-5", "glm-5.1", "glm-5.2", "glm-5.3"}


@pytest.mark.parametrize("key", [k for k in COMPARED if k not in INDEXED])
@pytest.mark.parametrize("num_tokens", [1024, 32_000, 131_072])
def test_agrees_within_one_percent(key: str, num_tokens: int) -> None:
    config = as_config(MODELS[key])
    assert config is not None
    ours = kv_bytes(geometry_from_config(config, name=key), num_tokens)
    assert ours == pytest.approx(their_bytes(MODELS[key], num_tokens), rel=0.01)


@pytest.mark.parametrize("key", sorted(INDEXED))
def test_the_indexer_alone_explains_the_difference(key: str) -> None:
    config = as_config(MODELS[key])
    assert config is not None
    geometry = geometry_from_config(config, name=key)
    indexer = next(g for g in geometry.groups if g.kind is LayerKind.INDEXER)
    in_bf16 = 2 * config["index_head_dim"] * indexer.num_layers * 1024
    ours = kv_bytes(geometry, 1024) - indexer.num_bytes(1024) + in_bf16
    assert ours == their_bytes(MODELS[key], 1024)


@pytest.mark.parametrize("key", REFUSED)
def test_architectures_without_a_formula_are_refused_by_field(key: str) -> None:
    model = MODELS[key]
    config = {**model["fields"], "model_type": model["formula"]}
    with pytest.raises(ConfigError, match=r"field|understood"):
        geometry_from_config(config, name=key)


def test_most_of_the_catalogue_is_compared() -> None:
    assert len(COMPARED) >= 50
    assert len(REFUSED) <= 8
