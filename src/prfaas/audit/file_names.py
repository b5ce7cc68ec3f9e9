"""Files of audit logs in a folder.

NAME.000001.jsonl   lines; higher numbers continue the chain
NAME.head           copy of the last checkpoint
NAME.pub            public key of the checkpoints
NAME.key            private key, unless `keys` names another directory
NAME.lock           held by the process that writes
"""

from __future__ import annotations

import re
from pathlib import Path

_FILE = re.compile(r"(.+)\.([0-9]{6,})\.jsonl")
_ODD = re.compile(r"[^A-Za-z0-9._-]")


def log_name(process: str) -> str:
    """Name of the log of a process: its own, with _ for what no file name should have."""
    return _ODD.sub("_", process)


def file_path(folder: Path, log: str, number: int) -> Path:
    """Path of one file of a log."""
    return folder / f"{log}.{number:06d}.jsonl"


def logs_in(folder: Path) -> dict[str, dict[int, Path]]:
    """Files of each log in a folder, by number."""
    found: dict[str, dict[int, Path]] = {}
    for path in folder.iterdir():
        if named := _FILE.fullmatch(path.name):
            found.setdefault(named[1], {})[int(named[2])] = path
    return {log: dict(sorted(files.items())) for log, files in sorted(found.items())}
