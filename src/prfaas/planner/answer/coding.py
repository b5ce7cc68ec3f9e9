"""Effect of the coding of links: an answer beside that of the same question with raw links."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from prfaas.core.codec.codecs import LinkCodec, Quality
from prfaas.core.codec.gain import PlannedCodedLink
from prfaas.planner.answer.verdict import VerdictAnswer
from prfaas.planner.model.kv_geometry import KvGeometry, kv_bytes_at, wire_bytes_at
from prfaas.planner.problem import PrfaasCluster, Problem
from prfaas.planner.solve.designs import Design
from prfaas.planner.solve.throughput import BITS


@dataclass(frozen=True, slots=True)
class LinkEffect:
    """Coding of one link."""

    cluster: str
    """PrfaaS cluster at its end."""
    codec: LinkCodec
    quality: Quality
    """Quality class of its blocks."""
    is_coding: bool
    """True if it codes or rounds at this bandwidth."""
    ratio: float
    """Bytes of keys and values for a byte on the link; 1 if they go as they are."""
    gain: float
    """Rate of coded blocks for that of raw ones, expected by the rule of pool nodes."""
    hand_off_ratio: float
    """Bytes of the whole hand-off of a prompt of l_long for a byte on the link."""


@dataclass(frozen=True, slots=True)
class CodingSide:
    """An answer with or without coding, exact."""

    answer: VerdictAnswer
    gain: float
    offload_threshold: float | None
    rate_per_s: float
    egress_bits_per_s: float
    """Traffic of all links at Λ_max."""
    offloaded_bytes: float
    """Bytes on the links for one offloaded request; 0 if none is."""
    price_per_mtoken: float
    """Price of one million prompt tokens."""
    traffic_price_per_h: float
    """Price of the traffic at Λ_max for one hour."""


@dataclass(frozen=True, slots=True)
class CodingEffect:
    """The effect of coding on an answer."""

    quality: str
    """Quality classes of the links."""
    links: tuple[LinkEffect, ...]
    raw: CodingSide
    """The answer if all links were raw."""
    coded: CodingSide


def asks_for_coding(problem: Problem) -> bool:
    """Return True if any link may code."""
    return any(c.link.coding.mode is not LinkCodec.RAW for c in problem.prfaas)


def without_coding(problem: Problem) -> Problem:
    """Return the question with every link raw."""
    return with_class(problem, LinkCodec.RAW, Quality.LOSSLESS)


def with_class(problem: Problem, mode: LinkCodec, quality: Quality) -> Problem:
    """Return the question with every link in one class; their lanes stay."""
    clusters = tuple(
        replace(c, link=replace(c.link, coding=replace(c.link.coding, mode=mode, quality=quality)))
        for c in problem.prfaas
    )
    return replace(problem, prfaas=clusters)


def classes_of(problem: Problem) -> dict[str, Problem]:
    """Return the question in every way its links could code, by name: raw, lossless, and each
    quality class that rounds something of the model."""
    found = {
        LinkCodec.RAW.value: without_coding(problem),
        Quality.LOSSLESS.value: with_class(problem, LinkCodec.AUTO, Quality.LOSSLESS),
    }
    geometry = problem.geometry
    if geometry.kv_dtype == "bfloat16":
        found[Quality.FP8.value] = with_class(problem, LinkCodec.AUTO, Quality.FP8)
        if geometry.has_pages:
            found[Quality.KIVI4.value] = with_class(problem, LinkCodec.AUTO, Quality.KIVI4)
    if geometry.state_bytes and geometry.state_dtype == "float32":
        rounded = [Quality(name) for name in list(found) if name != LinkCodec.RAW]
        for quality in (each.with_state for each in rounded):
            found[quality.value] = with_class(problem, LinkCodec.AUTO, quality)
    return found


def side_of(design: Design, answer: VerdictAnswer, gain: float) -> CodingSide:
    """Return one side of the comparison."""
    found = design.operation
    offloaded_per_s = found.rate_per_s * found.offload_fraction
    size = found.egress_bits_per_s / BITS / offloaded_per_s if offloaded_per_s else 0.0
    return CodingSide(
        answer=answer,
        gain=gain,
        offload_threshold=found.whole_threshold,
        rate_per_s=found.rate_per_s,
        egress_bits_per_s=found.egress_bits_per_s,
        offloaded_bytes=size,
        price_per_mtoken=design.price_per_mtoken,
        traffic_price_per_h=design.link_price_per_h,
    )


def coding_effect(
    problem: Problem, mean_long: float, raw: CodingSide, coded: CodingSide
) -> CodingEffect:
    """Return the effect of coding.

    Args:
        mean_long: l_long, tokens.
        raw: The answer if all links were raw.
    """
    links = tuple(_link_effect(cluster, problem.geometry, mean_long) for cluster in problem.prfaas)
    qualities = sorted({link.quality for link in links})
    return CodingEffect(", ".join(qualities), links, raw, coded)


def _link_effect(cluster: PrfaasCluster, geometry: KvGeometry, mean_long: float) -> LinkEffect:
    link = cluster.coded
    return LinkEffect(
        cluster=cluster.name,
        codec=cluster.link.coding.mode,
        quality=cluster.link.coding.quality,
        is_coding=link.is_coding,
        ratio=link.attention_ratio(geometry.kv_dtype),
        gain=link.gain,
        hand_off_ratio=_hand_off_ratio(geometry, mean_long, link),
    )


def _hand_off_ratio(geometry: KvGeometry, num_tokens: float, link: PlannedCodedLink) -> float:
    tokens = np.array([num_tokens])
    return float(kv_bytes_at(geometry, tokens)[0] / wire_bytes_at(geometry, tokens, link)[0])
