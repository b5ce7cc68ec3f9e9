"""Deployment files that `prfaas check` passes."""

from .conftest import EXAMPLES

CASE_STUDY = EXAMPLES / "plan" / "paper-case-study.toml"


TIMING = (
    (EXAMPLES / "timing.toml")
    .read_text()
    .replace("examples/plan/paper-case-study.toml", str(CASE_STUDY))
)
