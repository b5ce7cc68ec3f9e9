"""Adapters (LoRA), which are models of an engine beside the one that is served.

Requests for them are prefilled and decoded by one PD engine. vLLM names the blocks of an adapter by
its name and path, which says nothing of its bytes at another site.
"""

from __future__ import annotations

from prfaas.gateway.http.json_codec import as_object

ADAPTERS_MAX = 1000
"""Adapters of an engine that can be asked for; vLLM holds far fewer at a time."""
NAME_CHARS_MAX = 256


def adapters_in(models: object, model: str) -> frozenset[str]:
    """Names of the adapters in an engine's list of models: those with a parent."""
    found = as_object(models).get("data")
    cards = [as_object(card) for card in found] if isinstance(found, list) else []
    names = [
        name
        for card in cards
        if isinstance(name := card.get("id"), str)
        and isinstance(card.get("parent"), str)
        and 0 < len(name) <= NAME_CHARS_MAX
        and name != model
    ]
    return frozenset(names[:ADAPTERS_MAX])
