"""The stamp of a disk tier: the regions under which its blocks were accepted.

A block has no regions of its own: what lies on a disk was allowed in the footprint that its pool
node had. Under another footprint nothing is known of it, and it is dropped.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from prfaas.core.transfer.residency import Regions
from prfaas.logs import log_event

_log = logging.getLogger(__name__)

STAMP = "regions"
"""File in the folder: the regions, a line each."""


def stamp(folder: Path, regions: Regions, segments: Iterable[Path]) -> None:
    """Remove segments that were written under other regions, and write down those of now; OSError
    if the folder cannot be changed.

    Call it while the folder is locked, before segments are read.

    Args:
        folder: Of the disk tier.
        regions: Footprint of the pool node; without any, the folder loses its stamp.
        segments: Files with blocks.
    """
    file, text = folder / STAMP, "".join(f"{region}\n" for region in sorted(regions))
    if not regions:
        file.unlink(missing_ok=True)
        return
    if file.exists() and file.read_text(errors="replace") == text:
        return
    # Whoever is interrupted here does it again: the stamp is the last thing to change.
    removed = list(segments)
    for path in removed:
        path.unlink()
    draft = folder / f"{STAMP}.draft"
    with draft.open("w") as written:
        written.write(text)
        written.flush()
        os.fsync(written.fileno())
    draft.replace(file)
    if removed:
        fields = {"folder": str(folder), "files": len(removed)}
        log_event(
            _log, logging.WARNING, "disk_emptied", regions=",".join(sorted(regions)), **fields
        )
