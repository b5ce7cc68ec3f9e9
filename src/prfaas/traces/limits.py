"""Limits on the contents of a trace."""

from __future__ import annotations

FILE_BYTES_MAX = 4 * 2**30
"""Limit of an unpacked trace."""
LINE_BYTES_MAX = 2**24
NUM_REQUESTS_MAX = 5_000_000
NUM_PROMPT_TOKENS_MAX = 2_000_000
NUM_OUTPUT_TOKENS_MAX = 2_000_000
BLOCK_ID_MAX = 2**48
NUM_BLOCK_IDS_MAX = 50_000_000
"""Limit over all requests of a trace."""
TENANT_CHARS_MAX = 128
SECONDS_MAX = 10.0**9
"""Limit of a pause."""
INSTANT_S_MAX = 10.0**10
"""Seconds since 1970 in the year 2286."""
SPAN_S = 366 * 86_400
"""An instant that is further from the trace's median is damaged."""
