"""Files that prfaas comes with: examples, recorded workloads, dashboards, alert rules, the chart.

A wheel has them in this package, a checkout at its root. A file that is named on a command line and
does not exist is looked for there: `prfaas plan paper-case-study` runs in an empty folder.
"""

from __future__ import annotations

from pathlib import Path

_INSTALLED = Path(__file__).with_name("shipped")
ROOT = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[2]
"""Folder of `examples`, `dashboards` and `deploy`."""


def shipped_file(path: Path, folder: str = "") -> Path | None:
    """The shipped file of a path that does not exist, absolute; None if there is none.

    Args:
        path: From the working directory, as in `examples/laptop.toml`; or a name, as in `laptop`.
        folder: Folder of `examples` with the files of this kind, for names.
    """
    if path.exists() or path.is_absolute() or ".." in path.parts:
        return None
    here = ROOT / "examples" / folder
    places = (ROOT / path, here / path, here / f"{path}.toml")
    return next((place for place in places if place.is_file()), None)


def found(path: Path, folder: str = "") -> Path:
    """The path, or the shipped file that it names if there is nothing at the path."""
    return shipped_file(path, folder) or path
