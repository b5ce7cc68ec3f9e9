"""Config fields that do not change the size of a KV cache.

A config is accepted only if every field that is set was read, or is listed in
`data/harmless_fields.txt`, whatever the architecture. An unknown field is named in an error and not
ignored. `tests/planner/test_hf_zoo.py` checks the list against all causal models of `transformers`.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources


@cache
def _harmless() -> tuple[frozenset[str], re.Pattern[str]]:
    """Names, and the families of names."""
    text = resources.files("prfaas.planner").joinpath("data/harmless_fields.txt").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    names = frozenset(line for line in lines if not line.startswith("~"))
    return names, re.compile("|".join(f"(?:{line[1:]})" for line in lines if line[0] == "~"))


def is_harmless(field: str) -> bool:
    """Return True if the field is known not to change the size of a KV cache."""
    names, families = _harmless()
    return field in names or families.fullmatch(field) is not None
