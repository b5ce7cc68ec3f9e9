"""Comparison of the engines' KV layouts: who differs from the PD cluster, and in which facts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prfaas.config.clusters import ClusterRole
from prfaas.config.deployment import Deployment
from prfaas.core.kv.layout_facts import Difference, Facts, differences, in_words
from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.pools.pool_client import Pools
from prfaas.logs import log_event

_log = logging.getLogger(__name__)

SHOWN_MAX = 64
"""Differences of one engine that an answer lists."""
PAIRS_MAX = 256


class _Announced(NamedTuple):
    """The layout that an engine announced; facts and model are empty if its pool sends none."""

    name: str
    layout_id: bytes
    facts: Facts
    model: str


@dataclass(frozen=True, slots=True)
class Mismatch:
    """An engine whose blocks mean something else than those of the PD cluster.

    Attributes:
        engine: Its name.
        reference: Engine of the PD cluster it was compared with.
        found: Facts that differ, `ours` of the reference; empty if one side sends none.
        model: Model of the engine in words; "" if it is not known.
        reference_model: The same of the reference.
    """

    engine: str
    reference: str
    found: Sequence[Difference]
    model: str = ""
    reference_model: str = ""

    @property
    def words(self) -> str:
        """The first differences as a sentence."""
        words = in_words(self.found, self.reference, self.engine)
        models = (self.reference_model, self.model)
        if models[0] != models[1] and any(d.fact.startswith("model.") for d in self.found):
            words += f" (models: {models[0] or '?'} and {models[1] or '?'})"
        return words

    def as_json(self) -> JsonObject:
        """The mismatch for an answer of the control API."""
        return {
            "engine": self.engine,
            "reference": self.reference,
            "models": {self.engine: self.model, self.reference: self.reference_model},
            "num_differences": len(self.found),
            "differences": [
                {"fact": d.fact, self.reference: d.ours, self.engine: d.theirs}
                for d in self.found[:SHOWN_MAX]
            ],
            "words": self.words,
        }


class LayoutCheck:
    """Compares every engine with the PD cluster.

    The reference is an engine of the PD cluster with the layout that most of them have.

    Args:
        deployment: The engines, in their order.
        pools: What the pool nodes announced.
    """

    def __init__(self, deployment: Deployment, pools: Pools) -> None:
        self._deployment, self._pools = deployment, pools
        self._found: dict[tuple[bytes, bytes], Sequence[Difference]] = {}
        self._logged: dict[str, str] = {}
        self.on_mismatch: Callable[[str, str], None] = lambda *_: None
        """Called with an engine and how it differs; with "" once it does not any more."""

    @property
    def _engines(self) -> list[tuple[str, str, ClusterRole]]:
        """Name, pool and role of the engines that there are now."""
        return [
            (name, engine.pool, table.role)
            for table in self._deployment.clusters.values()
            for name, engine in table.engines.items()
        ]

    def mismatches(self) -> list[Mismatch]:
        """Return the engines that differ now; those that have announced nothing are not named."""
        reference = self._reference()
        return [
            self._mismatch(reference, other)
            for name, pool, _ in self._engines
            if reference is not None
            and (other := self._announced(name, pool)) is not None
            and other.layout_id != reference.layout_id
        ]

    def num_differences(self, engine: str) -> int:
        """Return how many facts of an engine differ; at least 1 if its layout does."""
        found = next((each for each in self.mismatches() if each.engine == engine), None)
        return 0 if found is None else max(1, len(found.found))

    def words(self) -> str:
        """Return what keeps requests from being offloaded; "" if all layouts agree."""
        found = self.mismatches()
        away = {name for name, _, role in self._engines if role is ClusterRole.PRFAAS}
        remote = [each for each in found if each.engine in away]
        return (remote or found)[0].words if found else ""

    def note_changes(self) -> None:
        """Log mismatches that are new, and those that are over."""
        now = {each.engine: each.words for each in self.mismatches()}
        for engine, words in now.items():
            if self._logged.get(engine) != words:
                log_event(_log, logging.WARNING, "layout_mismatch", engine=engine, why=words)
                self.on_mismatch(engine, words)
        for engine in self._logged.keys() - now.keys():
            log_event(_log, logging.INFO, "layout_mismatch_over", engine=engine)
            self.on_mismatch(engine, "")
        self._logged = now

    def _announced(self, name: str, pool: str) -> _Announced | None:
        reported = self._pools.subscription(pool)
        layout = reported.layouts.get(name)
        if layout is None:
            return None
        sent = reported.facts.get(layout.layout_id)
        facts, model = (sent.facts, sent.model) if sent is not None else ({}, "")
        return _Announced(name, layout.layout_id, facts, model)

    def _reference(self) -> _Announced | None:
        known = [
            found
            for name, pool, role in self._engines
            if role is ClusterRole.PD and (found := self._announced(name, pool)) is not None
        ]
        if not known:
            return None
        [(most, _)] = Counter(each.layout_id for each in known).most_common(1)
        return next(each for each in known if each.layout_id == most)

    def _mismatch(self, reference: _Announced, other: _Announced) -> Mismatch:
        return Mismatch(
            other.name,
            reference.name,
            self._differences(reference, other),
            other.model,
            reference.model,
        )

    def _differences(self, reference: _Announced, other: _Announced) -> Sequence[Difference]:
        if not reference.facts or not other.facts:
            return ()
        pair = reference.layout_id, other.layout_id
        if pair not in self._found:
            if len(self._found) >= PAIRS_MAX:
                self._found.clear()
            self._found[pair] = differences(reference.facts, other.facts)
        return self._found[pair]
