"""Facts that need a model which no test can run: read from stand-ins for vLLM's objects."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace as Fake
from typing import Any

import pytest

from prfaas.engines.identity import vllm_facts
from prfaas.engines.identity.checkpoint_files import FileDigests
from prfaas.engines.identity.values import digest, flat, name_of, text_of
from prfaas.errors import ConfigError


def a_model(config: dict[str, Any], **fields: Any) -> Any:
    hf_config = Fake(to_dict=lambda: config, **config)
    return Fake(hf_config=hf_config, dtype="bfloat16", max_model_len=4096, **fields)


def caches(config: dict[str, Any], cache_dtype: str = "auto") -> dict[str, str]:
    made = Fake(model_config=a_model(config), cache_config=Fake(cache_dtype=cache_dtype))
    return vllm_facts._caches(made)


@pytest.mark.parametrize(
    ("config", "counts"),
    [
        ({"rope_parameters": {"rope_type": "longrope"}}, True),
        ({"rope_scaling": {"type": "su"}}, True),
        ({"text_config": {"rope_parameters": {"full": {"rope_type": "longrope"}}}}, True),
        ({"rope_parameters": {"rope_type": "yarn"}}, False),
        ({}, False),
    ],
)
def test_the_longest_sequence_counts_where_it_picks_the_rotary_factors(
    config: dict[str, Any], counts: bool
) -> None:
    assert ("rope.max_model_len" in caches(config)) == counts


def test_the_cache_dtype_is_that_of_the_model_where_nobody_says() -> None:
    assert caches({})["cache_config.cache_dtype"] == "bfloat16"
    assert caches({}, "fp8")["cache_config.cache_dtype"] == "fp8"


def remote_code(revision: str | None, *, trusted: bool = True) -> dict[str, str]:
    config = {"auto_map": {"AutoModel": "org/code--modeling.Model", "AutoConfig": "own.Config"}}
    model = a_model(config, trust_remote_code=trusted, code_revision=revision)
    return vllm_facts._remote_code(model)


def test_code_of_another_repository_has_to_be_pinned() -> None:
    with pytest.raises(ConfigError, match=r"taken from org/code, .*--code-revision COMMIT"):
        remote_code(None)
    assert remote_code("abc") == {"model.remote_code": "org/code@abc"}
    assert remote_code(None, trusted=False) == {}


def checkpoint(model: Path, digests: Path, **load: Any) -> dict[str, str]:
    loading = Fake(**({"load_format": "auto", "download_dir": None} | load))
    named = Fake(model=str(model), revision=None, model_weights="")
    return vllm_facts._checkpoint(named, loading, FileDigests(digests))[0]


def test_a_model_without_weights_on_this_machine_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds no weights .*that could be compared"):
        checkpoint(model, tmp_path / "kept")
    assert set(checkpoint(model, tmp_path / "kept", load_format="dummy")) == {"config"}
    named = Fake(model="local", revision=None, model_weights="s3://bucket/model")
    with pytest.raises(ConfigError, match="streamed from an object store"):
        vllm_facts._checkpoint(named, Fake(load_format="runai_streamer"), FileDigests(tmp_path))


def test_a_model_of_one_file_is_that_file(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"one")
    first = checkpoint(model, tmp_path / "kept")
    model.write_bytes(b"two")
    assert set(first) == {"weights"}
    assert checkpoint(model, tmp_path / "kept") != first


@pytest.mark.parametrize(
    "value",
    [
        "/home/somebody/model",
        "~/model",
        "../model",
        "C:\\models",
        '{"scales": "/secret/place"}',
        "s3://bucket/model",
        "x" * 161,
        "two\nlines",
        "\x1b[31m",
        "naïve",
        ["/home/somebody"],
    ],
)
def test_paths_and_long_values_are_sent_as_digests(value: Any) -> None:
    assert text_of(value).startswith("blake3:")
    assert len(text_of(value)) <= 160


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("org/name", "org/name"),
        ("torch.bfloat16", "bfloat16"),
        (1e-6, "1e-06"),
        (None, "null"),
        (True, "true"),
        ([1, 2], "[1,2]"),
        ({"b": 1, "a": {2, 1}}, '{"a":["1","2"],"b":1}'),
    ],
)
def test_short_values_are_sent_as_they_are(value: Any, text: str) -> None:
    assert text_of(value) == text


def test_names_are_plain_short_and_still_differ() -> None:
    assert name_of("config.rope_parameters.factor") == "config.rope_parameters.factor"
    odd = {name_of("a b"), name_of("a_b"), name_of("a\tb"), name_of("x" * 200), name_of("x" * 201)}
    assert len(odd) == 5
    assert max(map(len, odd)) <= 128
    assert dict(flat({"a": {"b": 1, "c": {}}, "d": [1]})) == {"a.b": 1, "a.c": {}, "d": [1]}
    assert digest([1]) != digest([2])
