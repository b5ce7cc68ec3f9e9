"""Parts that are broken on purpose, on the CPU: `python -m tests.gpu.kit.damages PART`.

Prints the faults of each damage as JSON; those of "" are the faults of an undamaged part.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.gpu.kit.parts import BY_NAME, run_part
from tests.gpu.kit.results import Results

DAMAGES = {
    "codec": ("flipped byte",),
    "copies": ("flipped byte", "wrong description", "skipped copy"),
    "layers": ("flipped byte", "wrong description", "skipped copy"),
    "pages": ("flipped byte", "wrong description"),
}


def faults_of(part: str) -> dict[str, list[str]]:
    """Return the faults by damage."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="kit-") as out:
        for damage in ("", *DAMAGES[part]):
            if part == "pages":
                from tests.gpu.kit.engines_part import kernel_blocks

                results = Results(Path(out), part, "cpu", damage)
                kernel_blocks(results)
                found[damage] = results.faults or results.skipped * bool(damage)
            else:
                found[damage] = run_part(BY_NAME[part], "cpu", Path(out), damage).faults
    return found


if __name__ == "__main__":
    print(json.dumps(faults_of(sys.argv[1])))
