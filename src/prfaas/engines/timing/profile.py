"""Times of an instance and sizes of its blocks, from a plan file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from prfaas.core.kv.blocks import CacheGroup, GroupKind, HashScheme, Layout, facts_id
from prfaas.core.routing.predictions import Costs
from prfaas.engines.identity.values import text_of
from prfaas.engines.launch import HASH_SEED
from prfaas.errors import ConfigError
from prfaas.planner.answer.plan_loader import Question, load_question
from prfaas.planner.hardware.profiles import PrefillProfile, StepTime, make_costs, step_time
from prfaas.planner.model.kv_geometry import KvGeometry


@dataclass(frozen=True, slots=True)
class InstanceProfile:
    """Profile of one instance."""

    costs: Costs
    """Prefill time and KV bytes by tokens; both of its prefill tables are this instance's."""
    step_ns: StepTime
    """Decode step time by batch and mean context."""
    batch_max: int
    """Limit of concurrent sequences."""
    kv_capacity_bytes: int | None
    """KV cache of running sequences; None when it never binds."""
    layout: Layout
    facts: dict[str, str]
    """Facts of the layout id."""


def load_profile(
    plan: Path,
    cluster: str | None,
    model: str,
    *,
    block_tokens: int,
    bytes_scale: float,
    hash_scheme: HashScheme = HashScheme.SHA256_CBOR,
) -> InstanceProfile:
    """The profile of one instance of a plan.

    Args:
        plan: Plan file of `prfaas plan`.
        cluster: A PrfaaS cluster of it; a single one answers to any name. None is the PD cluster.
        model: Name of the served model.
        bytes_scale: Size of blocks, as a share of the real one.
        hash_scheme: Names of blocks: vLLM's or SGLang's.

    Raises:
        ConfigError: The plan cannot be read, knows no such cluster, or has a model that the backend
            for SGLang refuses.
    """
    question = load_question(plan)
    problem, pd = question.problem, question.problem.pd
    prefill = pd.prefill if cluster is None else question.prfaas_cluster(cluster, plan).prefill
    facts = layout_facts(problem.geometry, model, block_tokens, bytes_scale, hash_scheme)
    layout = make_layout(problem.geometry, facts_id(facts), block_tokens, bytes_scale, hash_scheme)
    if hash_scheme is HashScheme.SGLANG_PAGES:
        check_pages(layout)
    return InstanceProfile(
        costs=_costs(question, prefill, block_tokens),
        step_ns=step_time(pd.decode),
        batch_max=problem.decode_slots,
        kv_capacity_bytes=None if pd.kv_capacity_bytes is None else int(pd.kv_capacity_bytes),
        layout=layout,
        facts=facts,
    )


def _costs(question: Question, prefill: PrefillProfile, block_tokens: int) -> Costs:
    return make_costs(
        question.problem.geometry,
        prefill,
        prefill,
        num_tokens_max=int(prefill.lengths[-1]) + 1,
        chunk_tokens=max(question.chunk_tokens // block_tokens, 1) * block_tokens,
        overlap=True,
    )


def layout_facts(
    geometry: KvGeometry,
    model: str,
    block_tokens: int,
    bytes_scale: float,
    hash_scheme: HashScheme = HashScheme.SHA256_CBOR,
) -> dict[str, str]:
    """Return the facts that have to agree between timing engines."""
    facts = {
        "engine": "prfaas timing engine",
        "model.name": text_of(model),
        "block_tokens": text_of(block_tokens),
        "bytes_scale": text_of(bytes_scale),
        "hash_scheme": hash_scheme.value,
    }
    if seed := _seed(hash_scheme):
        facts["hash_seed"] = seed
    groups = ((f"group.{i}", group) for i, group in enumerate(geometry.groups))
    return facts | {
        f"{name}.{field.name}": text_of(getattr(group, field.name))
        for name, group in groups
        for field in dataclasses.fields(group)
    }


def _seed(scheme: HashScheme) -> str:
    """SGLang's chain has no seed."""
    return "" if scheme is HashScheme.SGLANG_PAGES else HASH_SEED


def check_pages(layout: Layout) -> None:
    """Refuse a model that the backend for SGLang refuses; ConfigError if it has more than full
    attention."""
    others = sorted({g.kind for g in layout.groups} - {GroupKind.FULL_ATTENTION})
    if others:
        raise ConfigError(
            f"the plan's model has {', '.join(others)}: SGLang's pages are shared for models with "
            "full attention only; name a plan of such a model, or leave `hash_scheme` out"
        )


def make_layout(
    geometry: KvGeometry,
    layout_id: bytes,
    block_tokens: int,
    bytes_scale: float,
    hash_scheme: HashScheme = HashScheme.SHA256_CBOR,
) -> Layout:
    """The layout of a model's blocks: all layers of one kind are one cache group."""
    sizes: dict[tuple[GroupKind, int], float] = {}
    for group in geometry.groups:
        if group.token_bytes:
            window = group.window or 0
            kind = GroupKind.SLIDING_WINDOW if window else GroupKind.FULL_ATTENTION
            size = group.num_layers * group.token_bytes * block_tokens
            sizes[kind, window] = sizes.get((kind, window), 0) + size
        if group.state_bytes:
            kind = GroupKind.LINEAR_STATE
            size = group.num_layers * group.state_bytes
            sizes[kind, 0] = sizes.get((kind, 0), 0) + size
    groups = tuple(
        CacheGroup(index, kind, block_tokens, max(round(size * bytes_scale), 1), window)
        for index, ((kind, window), size) in enumerate(sorted(sizes.items()))
    )
    return Layout(layout_id, block_tokens, _seed(hash_scheme), groups, hash_scheme)
