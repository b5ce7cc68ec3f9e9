"""Fixture: a store with one provider, and settings of a tier in it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from prfaas.pool.shared.mooncake.settings import MooncakeLimits, MooncakeSettings
from tests.s3.fixtures import new_key

from .store import Store, missing, running_store

PATIENT = MooncakeLimits(check_s=0.05, request_s=60, stuck_s=60, start_s=60)
"""For busy machines, where nothing fails."""


@dataclass
class Mooncake:
    """A store.

    Attributes:
        store: Its processes.
        settings: Of the tier.
    """

    store: Store
    settings: MooncakeSettings

    def changed(self, **changes: Any) -> MooncakeSettings:
        return replace(self.settings, **changes)


@pytest.fixture
def mooncake(tmp_path: Path) -> Iterator[Mooncake]:
    if missing():
        pytest.skip(missing())
    keys = tmp_path / "site.keys"
    keys.write_text(f"{new_key()}\n")
    keys.chmod(0o600)
    with running_store() as store:
        yield Mooncake(
            store,
            MooncakeSettings(
                ("127.0.0.1", store.port),
                keys,
                f"site-{secrets.token_hex(4)}",
                deadline_ns=120 * 10**9,
                buffer_bytes=16 << 20,
                limits=PATIENT,
            ),
        )
