"""A recorded request."""

from __future__ import annotations

from typing import NamedTuple


class RecordedRequest(NamedTuple):
    """A recorded request: instant, lengths in tokens, ids of the prompt's blocks, tenant.

    An id names its block and all before it; the last block may be a partial one. No ids: nothing
    is known of common prefixes.
    """

    at_ns: int
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()
    tenant: str = ""
