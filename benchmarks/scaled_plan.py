"""The plan as the gateway gets it: with the bytes of the timing engines' blocks."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.two_sites import PLAN
from prfaas.units import parse_rate, parse_size


def scaled_plan(bits_per_s: float | None, bytes_scale: float, place: Path) -> Path:
    """Write the plan with KV bytes and link scaled; its profiles get absolute paths.

    Args:
        bits_per_s: Of the unscaled link; None is the plan's own.
        bytes_scale: Factor of bytes and of the link's rate.
        place: Folder of the file.
    """

    def size(found: re.Match[str]) -> str:
        return f'{found[1]}"{round(parse_size(found[2]) * bytes_scale)}B"'

    def rate(found: re.Match[str]) -> str:
        planned = parse_rate(found[2]) if bits_per_s is None else bits_per_s
        return f'{found[1]}"{round(planned * bytes_scale)}bps"'

    text = PLAN.read_text()
    text = re.sub(r'(?m)^(kv_\w+ += )"([^"]+)"', size, text)
    text = re.sub(r'(?m)^(bandwidth = )"([^"]+)"', rate, text)
    text = re.sub(r'(?m)^profile = "', f'profile = "{PLAN.parent}/', text)
    file = place / "plan.toml"
    file.write_text(text)
    return file
