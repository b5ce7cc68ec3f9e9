"""Fixtures of the tests of timing engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prfaas.engines.checkpoint import make_checkpoint
from prfaas.wire.identity import make_authority, make_identity

from .deployment import World, running


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoTokenizer

    path = tmp_path_factory.mktemp("models") / "tokenizer"
    make_checkpoint(path, weights=False)
    # What it imports takes seconds, in which pool nodes on this event loop would look dead.
    AutoTokenizer.from_pretrained(path)
    return path


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("identities")
    make_authority(directory)
    for name in ("gateway", "prfaas-pool", "pd-pool"):
        make_identity(directory, name)
    return directory


@pytest.fixture
async def world(checkpoint: Path, identities: Path, tmp_path: Path) -> AsyncIterator[World]:
    async with running(tmp_path, checkpoint, identities) as made:
        yield made
