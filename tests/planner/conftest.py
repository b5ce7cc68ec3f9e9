from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.planner.load import Question, load_question

EXAMPLES = Path(__file__).parents[2] / "examples" / "plan"


@pytest.fixture(scope="session")
def case_study() -> Question:
    return load_question(EXAMPLES / "paper-case-study.toml")
