"""The slow half of the suite runs only if `-m` names it."""

from __future__ import annotations

from tests.live.conftest import pytest_collection_modifyitems

__all__ = ["pytest_collection_modifyitems"]
