from __future__ import annotations

import pytest

from prfaas.planner.answer.plan_loader import Question, load_question

from .paths import EXAMPLES


@pytest.fixture(scope="session")
def case_study() -> Question:
    return load_question(EXAMPLES / "paper-case-study.toml")
