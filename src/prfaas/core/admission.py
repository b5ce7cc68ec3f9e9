"""Whether to let a request in: an early no instead of a queue in which everybody loses."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.units import NS_PER_S

RETRY_AFTER_S_MAX = 60


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer at the door.

    Attributes:
        admitted: Let in.
        retry_after_s: For the 429's `Retry-After`, whole seconds, at least 1; 0 when let in.
    """

    admitted: bool
    retry_after_s: int = 0


def admit(predicted_ttft_ns: int | None, ttft_max_ns: int | None) -> Admission:
    """Let in what is predicted to meet the target; unknown predictions and no target let in.

    Args:
        predicted_ttft_ns: Predicted time to first token on the chosen path.
        ttft_max_ns: Target.
    """
    if predicted_ttft_ns is None or ttft_max_ns is None or predicted_ttft_ns <= ttft_max_ns:
        return Admission(admitted=True)
    over_s = -(-(predicted_ttft_ns - ttft_max_ns) // NS_PER_S)
    return Admission(admitted=False, retry_after_s=min(over_s, RETRY_AFTER_S_MAX))
