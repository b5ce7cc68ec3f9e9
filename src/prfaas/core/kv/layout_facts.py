"""The facts behind a layout id, and what differs between those of two engines.

A fact is a short name with a short text as its value, such as `cache_dtype` with `bfloat16`. The
layout id is a digest of all facts of an engine. Ids are compared to decide, and facts to explain:
ids that differ have at least one fact that differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from prfaas.core.kv.blocks import HashScheme

Facts = Mapping[str, str]
"""Values by name, the most telling names first."""

FACTS_MAX = 1024
NAME_CHARS_MAX = 128
VALUE_CHARS_MAX = 160
ABSENT = "(none)"
"""Value of a fact that only the other side has."""
DEFAULTS = {"hash_scheme": HashScheme.SHA256_CBOR.value}
"""Values of facts that an engine leaves out: a new fact would change all layout ids."""
UNKNOWN = "an older prfaas sends no facts, or the ids are made by different rules"


def facts_id(facts: Facts) -> bytes:
    """Return the layout id of an engine with these facts, 32 bytes; their order does not count."""
    text = json.dumps(dict(facts), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


class Difference(NamedTuple):
    """A fact that differs between two engines.

    Attributes:
        ours: Value at the first engine; its default or `ABSENT` if it has none.
        theirs: Value at the second engine.
    """

    fact: str
    ours: str
    theirs: str


def differences(ours: Facts, theirs: Facts) -> list[Difference]:
    """Return the facts that differ, in the order of `ours`, then those that `theirs` alone has."""
    names = dict.fromkeys([*ours, *theirs])
    absent = {name: DEFAULTS.get(name, ABSENT) for name in names}
    pairs = ((name, ours.get(name, absent[name]), theirs.get(name, absent[name])) for name in names)
    return [Difference(*pair) for pair in pairs if pair[1] != pair[2]]


def in_words(found: Sequence[Difference], our_name: str, their_name: str, limit: int = 3) -> str:
    """Return the first differences as a sentence, such as `dtype: A at pd, B at prfaas`.

    Args:
        found: What differs; empty if it is not known.
        our_name: Name of the engine that `ours` is from.
        their_name: Name of the other engine.
        limit: Number of differences that are written out.
    """
    if not found:
        return f"{our_name} and {their_name}: {UNKNOWN}"
    shown = [f"{d.fact}: {d.ours} at {our_name}, {d.theirs} at {their_name}" for d in found[:limit]]
    rest = len(found) - limit
    return "; ".join(shown) + (f"; and {rest} more" if rest > 0 else "")
