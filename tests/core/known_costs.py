"""Costs of instances that tests predict with."""

from __future__ import annotations

from tests.sim.systems import linear_costs

COSTS = linear_costs()
"""1 ms a token on either side."""
