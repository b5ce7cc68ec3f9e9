"""Quality classes of KV blocks: how much of a block may be lost on a link.

A block whose bytes were rounded taints every block that is computed after it. So the class is part
of the salt of block names (`core/kv/tenant_salts.py`): blocks of two classes never have one name.
"""

from __future__ import annotations

from enum import StrEnum

from prfaas.units import BITS_PER_BYTE

STATE_SUFFIX = "+bf16-state"


class Quality(StrEnum):
    """Quality class, by the operator's word only."""

    LOSSLESS = "lossless"
    """Every bit arrives."""
    FP8 = "fp8"
    """Keys and values of attention with 8 bits (e4m3) and a scale for 128 numbers."""
    KIVI4 = "kivi4"
    """Keys and values of attention with 4 bits: keys per channel, values per token."""
    FP8_STATE = "fp8+bf16-state"
    """The same as `fp8`, and float32 states as bfloat16."""
    KIVI4_STATE = "kivi4+bf16-state"
    """The same as `kivi4`, and float32 states as bfloat16."""
    STATE = "bf16-state"
    """float32 states as bfloat16; attention as it is."""

    @property
    def attention(self) -> Quality:
        """Class of keys and values: `lossless`, `fp8` or `kivi4`."""
        return Quality.LOSSLESS if self is Quality.STATE else Quality(self.split("+")[0])

    @property
    def rounds_state(self) -> bool:
        """Return True if float32 states are sent as bfloat16."""
        return self is Quality.STATE or self.endswith(STATE_SUFFIX)

    @property
    def with_state(self) -> Quality:
        """The class that rounds float32 states as well."""
        attention = self.attention
        return Quality(attention + STATE_SUFFIX) if attention.is_lossy else Quality.STATE

    @property
    def is_lossy(self) -> bool:
        """Return True if blocks of this class may be rounded."""
        return self is not Quality.LOSSLESS


GROUP_VALUES = 128
"""Numbers under one scale in `fp8`."""
KIVI_GROUP = 32
"""Tokens (keys) or channels (values) under one scale in `kivi4`."""
_KIVI_BITS = 4 + 2 * 16 / KIVI_GROUP
RATIOS = {
    Quality.FP8: 16 / (BITS_PER_BYTE * (1 + 1 / GROUP_VALUES)),
    Quality.KIVI4: 16 / _KIVI_BITS,
}
"""Bytes of a bfloat16 block of attention for a byte on the link; blocks of fewer than 32 tokens
gain less with `kivi4`."""
