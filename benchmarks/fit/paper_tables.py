"""Tables of arXiv:2604.15039, "Prefill-as-a-Service", that plans and tests quote.

Table 3: KV throughput of one instance of 8xH200 with SGLang v0.5.9, Gbit/s, at 1K, 8K, 32K and 128K
tokens. "K" is mixed in the paper: only 1,024, 8,192, 32,000 and 130,000 fit the lengths of its
table 5, so the same are taken here.
"""

from __future__ import annotations

LENGTHS = (1_024, 8_192, 32_000, 130_000)
KV_GBPS = {
    "Kimi Linear": (1.19, 2.29, 3.87, 4.88),
    "MiMo-V2-Flash": (0.82, 2.85, 4.66, 4.71),
    "Qwen3.5-397B": (4.13, 6.28, 8.25, 7.47),
    "Ring-2.5-1T": (7.27, 4.47, 2.59, 1.46),
    "MiniMax-M2.5": (4.94, 32.87, 59.93, 47.82),
    "Qwen3-235B": (4.12, 22.42, 33.35, 21.50),
}
