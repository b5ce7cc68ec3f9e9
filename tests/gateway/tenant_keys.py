"""Tenants with keys."""

from __future__ import annotations

from typing import Any

from prfaas.gateway.tenancy.tenants import key_hash, new_key

KEYS = {name: new_key() for name in ("red", "blue", "operator")}


HASHES = {name: key_hash(key) for name, key in KEYS.items()}


def tenants(**red: Any) -> dict[str, Any]:
    """Red with limits, blue without."""
    return {"red": {"keys": [HASHES["red"]], **red}, "blue": {"keys": [HASHES["blue"]]}}


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}
