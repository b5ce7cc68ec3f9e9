"""A deployment file that is valid, as tables, and tables as TOML."""

from __future__ import annotations

from typing import Any

GOOD: dict[str, Any] = {
    "model": {"name": "tiny", "path": "/models/tiny"},
    "gateway": {"listen": "127.0.0.1:8000"},
    "routing": {"offload_threshold": 1000, "transfer_timeout": "5s"},
    "security": {"identities": "identities"},
    "clusters": {
        "far": {
            "role": "prfaas",
            "pools": {"far-pool": {"memory": "1GiB"}},
            "engines": {"far-engine": {"pool": "far-pool"}},
        },
        "home": {
            "role": "pd",
            "pools": {"home-pool": {"listen": "0.0.0.0:7100"}},
            "engines": {"home-engine": {"pool": "home-pool", "url": "http://10.0.0.1:8101"}},
        },
    },
}


def toml(table: dict[str, Any], place: str = "") -> str:
    """A TOML text of nested tables with plain values."""
    lines = [f"[{place}]"] if place else []
    lines += [f"{key} = {_value(v)}" for key, v in table.items() if not isinstance(v, dict)]
    for key, v in table.items():
        if isinstance(v, dict):
            lines.append(toml(v, f"{place}.{key}" if place else key))
    return "\n".join(lines)


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
