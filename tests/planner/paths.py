"""Paths of files of the repository that tests read."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples" / "plan"
