"""Comparison of the engines' KV layouts with the PD cluster: engines that differ, and the facts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prfaas.config.clusters import ClusterRole
from prfaas.config.deployment import Deployment
from prfaas.core.kv.blocks import Difference, Facts, differences, in_words
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
    pool: str
    layout_id: bytes
    is_local: bool
    facts: Facts
    model: str


@dataclass(frozen=True, slots=True)
class Mismatch:
    """An engine whose blocks mean something else than those of the PD cluster."""

    engine: str
    reference: str
    """Engine of the PD cluster it was compared with."""
    found: Sequence[Difference]
    """Facts that differ, `ours` of the reference; empty if one side sends none."""
    model: str = ""
    """Model of the engine in words; "" if it is not known."""
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

    The reference is an engine of the PD cluster with the layout that most of them have. A report of
    a pool node costs work for its own engines only, unless it changes the reference.

    Args:
        deployment: The engines, in their order.
        pools: Layouts that the pool nodes announced.
    """

    def __init__(self, deployment: Deployment, pools: Pools) -> None:
        self._deployment, self._pools = deployment, pools
        self._differing: dict[tuple[bytes, bytes], Sequence[Difference]] = {}
        self._known: dict[str, dict[str, _Announced]] = {}
        """Announced layouts by pool and engine."""
        self._local: Counter[bytes] = Counter()
        """Engines of the PD cluster by layout."""
        self._reference: _Announced | None = None
        self._found: dict[str, Mismatch] = {}
        """Engines that differ, by name."""
        self.on_mismatch: Callable[[str, str], None] = lambda *_: None
        """Called with an engine and how it differs; with "" once it does not any more."""

    def mismatches(self) -> list[Mismatch]:
        """Return the engines that differ now; those that have announced nothing are not named."""
        return list(self._found.values())

    def num_differences(self, engine: str) -> int:
        """Return how many facts of an engine differ; at least 1 if its layout does."""
        found = self._found.get(engine)
        return 0 if found is None else max(1, len(found.found))

    def words(self) -> str:
        """Return what keeps requests from being offloaded; "" if all layouts agree."""
        found = self.mismatches()
        remotes = self._deployment.with_role(ClusterRole.PRFAAS)
        remote = [each for each in found if any(each.engine in table.engines for table in remotes)]
        return (remote or found)[0].words if found else ""

    def note_changes(self, pool: str) -> None:
        """Compare the engines of a pool node that has reported, and log what is new or over."""
        before, now = self._known.get(pool, {}), self._announced(pool)
        if now == before:
            return
        self._known[pool] = now
        if not now:
            del self._known[pool]
        for found, sign in ((before, -1), (now, 1)):
            self._local.update({each.layout_id: sign for each in found.values() if each.is_local})
        if self._keeps_reference():
            changed = {name: now.get(name) for name in before.keys() | now.keys()}
        else:
            changed = {n: each for known in self._known.values() for n, each in known.items()}
            changed = dict.fromkeys(before) | changed
        for name, each in sorted(changed.items()):
            self._compare(name, each)

    def _compare(self, name: str, each: _Announced | None) -> None:
        reference, found = self._reference, None
        if reference is not None and each is not None and each.layout_id != reference.layout_id:
            found = self._mismatch(reference, each)
        old = self._found.pop(name, None)
        if found is not None:
            self._found[name] = found
            if old is None or old.words != found.words:
                log_event(_log, logging.WARNING, "layout_mismatch", engine=name, why=found.words)
                self.on_mismatch(name, found.words)
        elif old is not None:
            log_event(_log, logging.INFO, "layout_mismatch_over", engine=name)
            self.on_mismatch(name, "")

    def _announced(self, pool: str) -> dict[str, _Announced]:
        """Layouts that a pool node announces for its engines."""
        found: dict[str, _Announced] = {}
        for name, layout in self._pools.layouts(pool).items():
            sent = self._pools.subscription(pool).facts.get(layout.layout_id)
            facts, model = (sent.facts, sent.model) if sent is not None else ({}, "")
            for table in self._deployment.clusters.values():
                engine = table.engines.get(name)
                if engine is not None and engine.pool == pool:
                    is_local = table.role is ClusterRole.PD
                    found[name] = _Announced(name, pool, layout.layout_id, is_local, facts, model)
        return found

    def _keeps_reference(self) -> bool:
        """Return False if another engine is the reference now."""
        old, most = self._reference, max(self._local.values(), default=0)
        if old is not None:
            now = self._known.get(old.pool, {}).get(old.name)
            if now == old and self._local[old.layout_id] == most:
                return True
        self._reference = next(
            (
                each
                for table in self._deployment.with_role(ClusterRole.PD)
                for name, engine in table.engines.items()
                if (each := self._known.get(engine.pool, {}).get(name)) is not None
                and self._local[each.layout_id] == most
            ),
            None,
        )
        return self._reference == old

    def _mismatch(self, reference: _Announced, other: _Announced) -> Mismatch:
        return Mismatch(
            other.name,
            reference.name,
            self._differences(reference, other),
            other.model,
            reference.model,
        )

    def _differences(self, reference: _Announced, other: _Announced) -> Sequence[Difference]:
        ours, theirs = reference.facts, other.facts
        if not ours or not theirs:
            return ()
        pair = reference.layout_id, other.layout_id
        if pair not in self._differing:
            if len(self._differing) >= PAIRS_MAX:
                self._differing.clear()
            self._differing[pair] = differences(ours, theirs)
        return self._differing[pair]
