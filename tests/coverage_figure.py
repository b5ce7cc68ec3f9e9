"""The coverage of `src` in one line, from the file that slipcover wrote: a figure, not a gate."""

import json
import sys
from pathlib import Path


def figure(file: Path) -> str:
    """Share of the lines of code that ran; words if slipcover wrote nothing."""
    try:
        summary = json.loads(file.read_text())["summary"]
    except (OSError, ValueError, KeyError) as error:
        return f"coverage of src: not known ({file}: {error})"
    covered, missing = summary["covered_lines"], summary["missing_lines"]
    return f"coverage of src: {summary['percent_covered']:.1f} % of {covered + missing:,} lines"


if __name__ == "__main__":
    print(figure(Path(sys.argv[1])))
