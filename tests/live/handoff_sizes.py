"""Bytes of a hand-off of the demo model."""

from __future__ import annotations

import json
from pathlib import Path

from prfaas.planner.model.hf_config import geometry_from_config
from prfaas.planner.model.kv_geometry import LayerKind, page_bytes
from tests.live.conftest import Live

BLOCK_TOKENS = 384


LINEAR_GROUPS = ("0", "1", "2")


ATTENTION_GROUP = "3"


def planned_bytes(live: Live, num_tokens: int, first_token: int = 0) -> int:
    """The planner's bytes of full blocks and one state of every linear layer."""
    config = json.loads((Path(live.topology.deployment.model.path) / "config.json").read_text())
    geometry = geometry_from_config(config, state_dtype="float32")
    num_blocks = (num_tokens - 1) // BLOCK_TOKENS - first_token // BLOCK_TOKENS
    attention = [group for group in geometry.groups if group.kind is LayerKind.FULL]
    states = [group for group in geometry.groups if group.kind is LayerKind.LINEAR]
    per_block = sum(group.num_layers * page_bytes(group, BLOCK_TOKENS) for group in attention)
    return num_blocks * per_block + sum(g.num_layers * g.state_bytes for g in states)
