"""Fixtures of the tests of the proxy."""

from pathlib import Path

import pytest

from prfaas.engines.checkpoint import make_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tokenizer"
    make_checkpoint(path, weights=False)
    return path
