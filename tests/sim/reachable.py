"""Objects that another object can look into."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from prfaas.core.routing.predictions import Costs

_ENDS = (type, ModuleType, BuiltinFunctionType, Costs)
"""Also tables of costs: numbers, and many of them."""


def simulator_types_held_by(root: object) -> set[str]:
    """Types of `prfaas.sim` with instances that can be reached from an object.

    Costs one visit of everything that the object holds.
    """
    return {
        type(held).__qualname__
        for held in _held_by(root)
        if type(held).__module__.startswith("prfaas.sim.")
    }


def _held_by(root: object) -> Iterator[Any]:
    """Everything that can be reached, except over modules, classes and global names."""
    seen, queue = {id(root)}, [root]
    while queue:
        held = queue.pop()
        yield held
        if isinstance(held, FunctionType):
            inside: list[Any] = list(held.__closure__ or ())
        else:
            inside = gc.get_referents(held)
        for other in inside:
            if id(other) not in seen and gc.is_tracked(other) and not isinstance(other, _ENDS):
                seen.add(id(other))
                queue.append(other)
