"""`prfaas` in a process of its own."""

from pathlib import Path


def said(tmp_path: Path) -> str:
    return (tmp_path / "output").read_text()
