"""Results of a part: a JSON file that is written anew with each record, so that a cut run keeps it.

part-copies.json: {"part", "device", "started_at", "records": [...], "faults": [...], "ended"}
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]


@dataclass
class Results:
    """The records of a part.

    Attributes:
        out: Folder of the files; they lie flat in it.
        part: Name of the part.
        device: "cuda" or "cpu".
        damage: What is broken on purpose; "" breaks nothing.
        records: Figures, each with what it is under `record`.
        faults: Sentences on what does not hold.
        skipped: Sentences on what did not run.
    """

    out: Path
    part: str
    device: str
    damage: str = ""
    records: list[Record] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def file(self) -> Path:
        return self.out / f"part-{self.part}.json"

    def add(self, record: str, /, **values: Any) -> None:
        """Add a record, and write the file."""
        at_s = round(time.monotonic() - self.began, 2)
        self.records.append({"record": record, "at_s": at_s} | values)
        self.save()

    def check(self, holds: bool, words: str) -> None:
        """Add a fault unless it holds, and write the file."""
        if not holds:
            self.faults.append(words)
        self.save()

    def skip(self, words: str) -> None:
        """Add what did not run, with the reason."""
        self.skipped.append(words)
        self.save()

    def save(self, ended: str = "") -> None:
        """Write the file.

        Args:
            ended: How the part ended; empty while it runs.
        """
        content = {
            "part": self.part,
            "device": self.device,
            "seconds": round(time.monotonic() - self.began, 1),
            "records": self.records,
            "faults": self.faults,
            "skipped": self.skipped,
            "ended": ended,
        }
        partial = self.file.with_suffix(".tmp")
        partial.write_text(json.dumps(content, indent=1))
        partial.replace(self.file)


def read(out: Path, part: str) -> Record | None:
    """Return what a part has written; None if it has not run."""
    file = out / f"part-{part}.json"
    found: Record | None = json.loads(file.read_text()) if file.exists() else None
    return found
