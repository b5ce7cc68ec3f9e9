"""Fixtures of a gateway between scripted parts."""

from tests.gateway.conftest import checkpoint, collector, times, world

__all__ = ["checkpoint", "collector", "times", "world"]
