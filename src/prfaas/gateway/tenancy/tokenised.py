"""The charge for text that is tokenised, whatever becomes of it."""

from __future__ import annotations

import time

from prfaas.core.admission.quotas import Quota

TOKENISED_PER_TOKEN = 16
"""Tokens that are only tokenised and count as one that is computed."""


def tokenising_cost(num_tokens: int) -> int:
    """Tokens that tokenising is charged as, rounded up."""
    return -(-num_tokens // TOKENISED_PER_TOKEN)


def charge_tokenising(quota: Quota, num_tokens: int) -> None:
    """Charge tokens that were made or turned into text."""
    quota.count_tokens(tokenising_cost(num_tokens), time.monotonic_ns())
