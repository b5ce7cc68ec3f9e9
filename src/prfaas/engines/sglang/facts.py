"""The facts of an SGLang engine: its model's bytes, its resolved configuration, its pages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from prfaas.core.kv.blocks import FACTS_MAX, HashScheme
from prfaas.engines.identity.checkpoint_files import (
    FileDigests,
    checkpoint_digests,
    find_checkpoint,
)
from prfaas.engines.identity.values import digest, name_of, text_of, words_of
from prfaas.engines.sglang.page_layout import HostRows
from prfaas.errors import ConfigError

VERSIONS = ("0.5.23",)
"""Releases whose names, hashes and storage interface were compared."""
NAMESPACES = ("model", "exec", "spec", "lora", "mm")
"""Parts of SGLang's configuration that can change the content of a page. Scheduling, serving,
disaggregation and observability cannot; memory and parallelism are in the facts of pages."""
NOT_COUNTED = frozenset(
    {
        # Counted by the bytes of the files.
        *("model.model_path", "model.revision", "model.download_dir", "model.model_checksum"),
        # Way and pace of loading, with the same weights at the end.
        *("model.trust_remote_code", "model.startup_weight_load_mode"),
        *("model.weight_loader_disable_mmap", "model.weight_loader_prefetch_checkpoints"),
        *("model.weight_loader_prefetch_num_threads", "model.is_startup_weight_load_overlap"),
        *("model.weight_loader_drop_cache_after_load", "model.delete_ckpt_after_loading"),
        *("model.weight_cache_mode", "model.weight_cache_socket", "model.weight_cache_timeout"),
        "model.engine_info_bootstrap_port",
        # Limits of requests, what is returned besides answers, and sampling.
        *("model.context_length", "exec.features.enable_custom_logit_processor"),
        *("exec.features.enable_return_hidden_states", "exec.features.return_hidden_states_mode"),
        *("exec.kernel.sampling_backend", "exec.kernel.grammar_backend"),
        # Memory and batch shapes of one engine.
        *("exec.features.enable_memory_saver", "exec.graph.cuda_graph_max_bs_decode"),
        *("exec.graph.cuda_graph_max_bs_prefill", "exec.graph.cuda_graph_bs_decode"),
        *("exec.graph.cuda_graph_bs_prefill", "mm.mm_processor_worker_num"),
        *("mm.mm_io_worker_num", "mm.allowed_media_domains"),
    }
)

_SECRET = re.compile(r"watermark")
"""Settings with keys; they change sampled tokens, and no page."""


def check_version() -> str:
    """Return the version of the installed SGLang; ConfigError if it is one that prfaas was not
    compared with."""
    version = metadata.version("sglang")
    if version not in VERSIONS:
        raise ConfigError(
            f"SGLang {version} is installed; prfaas knows the storage interface of "
            f"{', '.join(VERSIONS)}. Install that, or a prfaas that knows {version}"
        )
    return version


def resolved_configuration() -> dict[str, Any]:
    """Return SGLang's configuration of this process by dotted name, after all its rules.

    Raises:
        ConfigError: This process serves no model.
    """
    from sglang.srt.runtime_context import get_context

    try:
        bags = [(name, get_context().config_bag(name)) for name in NAMESPACES]
    except ValueError as error:
        raise ConfigError(f"SGLang has not published its configuration: {error}") from None
    return {name: value for prefix, bag in bags for name, value in leaves(prefix, bag)}


def num_nodes() -> int:
    """Return the number of hosts that the ranks of this engine are on, as SGLang was told."""
    from sglang.srt.runtime_context import get_context

    try:
        return int(
            dict(leaves("parallel", get_context().config_bag("parallel")))["parallel.nnodes"]
        )
    except (ValueError, KeyError):
        # Not published: a process of one host, as in SGLang's own tests of its storage.
        return 1


def leaves(prefix: str, bag: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of one of SGLang's configuration namespaces with dotted names."""
    yield from ((f"{prefix}.{name}", value) for name, value in bag._fields.items())
    for name, sub in bag._subs.items():
        yield from leaves(f"{prefix}.{name}", sub)


def model_facts(
    values: Mapping[str, Any], digests: FileDigests | None = None
) -> tuple[dict[str, str], str]:
    """Return digests of the model's files, and the model in words; ConfigError if the model cannot
    be tied to files on this machine.

    Args:
        values: `resolved_configuration`.
        digests: Digests of files; None takes those that are kept for this user.
    """
    path, revision = str(values["model.model_path"]), values.get("model.revision")
    directory, words = find_checkpoint(path, revision, values.get("model.download_dir"))
    digests = FileDigests() if digests is None else digests
    # All formats: SGLang may prefer another one than vLLM.
    found = checkpoint_digests(directory, digests, all_formats=True)
    return {f"model.{kind}": value for kind, value in found.items()}, words_of(words)


def configuration_facts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the configuration that can change the content of a page."""
    names = (name for name in values if name not in NOT_COUNTED and not _SECRET.search(name))
    counted = {name: values[name] for name in names if values[name] not in (None, {}, [])}
    return {name_of(f"config.{name}"): text_of(value) for name, value in sorted(counted.items())}


def page_facts(
    pools: Mapping[str, Any], rows: Mapping[str, HostRows], config: Any
) -> dict[str, str]:
    """Return what a page is: its tokens, type, order of bytes and ranks.

    Args:
        pools: SGLang's host pools by name.
        rows: Where their pages lie.
        config: SGLang's `HiCacheStorageConfig`.
    """
    facts = {
        "hash_scheme": HashScheme.SGLANG_PAGES.value,
        "blocks": "of each rank" if config.tp_size > 1 and not config.is_mla_model else "whole",
        "tp_size": text_of(1 if config.is_mla_model else config.tp_size),
    }
    for name, pool in sorted(pools.items()):
        facts |= {
            f"pool.{name}.dtype": text_of(str(pool.dtype)),
            f"pool.{name}.page_tokens": text_of(rows[name].page_tokens),
            f"pool.{name}.layout": text_of(str(pool.layout)),
            f"pool.{name}.parts": digest([length for _, length in rows[name].parts]),
            f"pool.{name}.layers": text_of(f"{pool.start_layer}-{pool.end_layer}"),
        }
        tag = getattr(pool, "storage_format_tag", None)
        if tag is not None:
            facts[f"pool.{name}.format"] = text_of(str(tag))
    return facts


def all_facts(
    version: str,
    values: Mapping[str, Any],
    pages: Mapping[str, str],
    digests: FileDigests | None = None,
) -> tuple[dict[str, str], str]:
    """Return the facts of an engine, the most telling first, and its model in words; ConfigError if
    the model cannot be tied to files on this machine.

    Args:
        values: `resolved_configuration`.
        pages: `page_facts`.
        digests: Digests of files; None takes those that are kept for this user.
    """
    model, words = model_facts(values, digests)
    facts = {**model, **pages, "engine": f"sglang {version}", **configuration_facts(values)}
    if len(facts) > FACTS_MAX:
        raise ConfigError(f"{len(facts)} facts of the configuration; the limit is {FACTS_MAX}")
    return facts, words
