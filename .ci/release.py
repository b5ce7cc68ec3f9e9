"""Builds a release, checks it and tags it: `make release VERSION=0.1.0`; `make dist` only builds.

Nothing is published from here: the workflow of the tag does that (.github/workflows/release.yml).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from datetime import UTC, datetime
from pathlib import Path

from packaging.metadata import Metadata
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parents[1]
WHEEL_BYTES_MAX = 4 << 20
NEEDED = (
    "prfaas/py.typed",
    "prfaas/gateway/console/assets/index.html",
    "prfaas-{version}.dist-info/entry_points.txt",
    "prfaas-{version}.dist-info/licenses/LICENSE",
)
"""Files that a wheel has to have."""


class ReleaseError(Exception):
    """Why there is no release, with the next step."""


def git(*words: str, root: Path) -> str:
    """Output of git; ReleaseError if it fails."""
    command = [shutil.which("git") or "git", *words]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def declared(root: Path) -> str:
    """The version in pyproject.toml."""
    version: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    return version


def section(changelog: str, version: str) -> tuple[str, str]:
    """Heading and text of a version in the changelog."""
    found = re.search(rf"^## {re.escape(version)}\b(.*)$", changelog, re.MULTILINE)
    if found is None:
        raise ReleaseError(
            f"CHANGELOG.md has no section `## {version}`: write what changes for users"
        )
    text = re.split(r"^## ", changelog[found.end() :], maxsplit=1, flags=re.MULTILINE)[0].strip()
    if not text:
        raise ReleaseError(f"the section {version} of CHANGELOG.md is empty")
    return found[0], text


def check_tree(root: Path, version: str) -> None:
    """ReleaseError unless this version can be tagged here."""
    try:
        Version(version)
    except InvalidVersion:
        raise ReleaseError(f"{version!r} is no version: use one such as 0.1.0") from None
    if version != declared(root):
        raise ReleaseError(
            f"pyproject.toml has version {declared(root)}, not {version}: set it there, commit"
        )
    if changed := git("status", "--porcelain", root=root):
        count = len(changed.splitlines())
        raise ReleaseError(f"{count} files are not committed, {changed.split()[1]} first: commit")
    if git("tag", "--list", f"v{version}", root=root):
        raise ReleaseError(f"the tag v{version} exists: raise the version")


def build(root: Path) -> Path:
    """Build sdist and wheel; returns their folder."""
    folder = root / "dist"
    for earlier in folder.glob("prfaas-*"):
        earlier.unlink()
    uv = Path(sys.executable).with_name("uv")
    words = ["build", "--quiet", "--out-dir", str(folder), "--require-hashes"]
    words += ["--build-constraint", "requirements/build.txt"]
    done = subprocess.run([str(uv), *words], cwd=root, check=False)
    if done.returncode:
        raise ReleaseError(f"uv build ended with {done.returncode}, see above")
    return folder


def check_wheel(folder: Path, version: str) -> None:
    """ReleaseError unless the wheel is whole, and its metadata are valid."""
    wheel, source = (
        folder / f"prfaas-{version}-py3-none-any.whl",
        folder / f"prfaas-{version}.tar.gz",
    )
    for file in (wheel, source):
        if not file.exists():
            raise ReleaseError(f"{file.name} was not built")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        text = archive.read(f"prfaas-{version}.dist-info/METADATA")
    missing = [name for each in NEEDED if (name := each.format(version=version)) not in names]
    if missing:
        raise ReleaseError(f"the wheel lacks {', '.join(missing)}")
    if strange := sorted(name for name in names if name.split("/")[0] not in top(version)):
        raise ReleaseError(f"the wheel has {strange[0]}, which is not of the package")
    if wheel.stat().st_size > WHEEL_BYTES_MAX:
        raise ReleaseError(f"the wheel has {wheel.stat().st_size:,} B, over {WHEEL_BYTES_MAX:,}")
    metadata = Metadata.from_email(text, validate=True)
    if (metadata.name, str(metadata.version)) != ("prfaas", version):
        raise ReleaseError(f"the metadata are of {metadata.name} {metadata.version}")
    if metadata.description_content_type != "text/markdown" or not metadata.description:
        raise ReleaseError("the metadata have no description in Markdown")
    with tarfile.open(source) as archive_:
        if f"prfaas-{version}/pyproject.toml" not in archive_.getnames():
            raise ReleaseError(f"{source.name} has no pyproject.toml")


def top(version: str) -> tuple[str, ...]:
    """Folders at the top of a wheel."""
    return ("prfaas", f"prfaas-{version}.dist-info")


def release(root: Path, version: str) -> None:
    """Date the changelog, and tag."""
    changelog = root / "CHANGELOG.md"
    heading, notes = section(changelog.read_text(), version)
    if "unreleased" in heading:
        dated = f"## {version} ({datetime.now(UTC):%Y-%m-%d})"
        changelog.write_text(changelog.read_text().replace(heading, dated, 1))
        git("commit", "--quiet", "-m", f"Release {version}", "CHANGELOG.md", root=root)
    git("tag", "-a", f"v{version}", "-m", f"prfaas {version}", "-m", notes, root=root)


def main(words: list[str]) -> int:
    """Run; 0, or 1 with the reason."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", nargs="?", default="")
    parser.add_argument("--tag", action="store_true", help="tag the release after the checks")
    parser.add_argument("--root", type=Path, default=ROOT)
    given = parser.parse_args(words)
    root: Path = given.root
    version = given.version or declared(root)
    try:
        if given.tag:
            check_tree(root, version)
        elif version != declared(root):
            raise ReleaseError(f"pyproject.toml has version {declared(root)}, not {version}")
        _, notes = section((root / "CHANGELOG.md").read_text(), version)
        folder = build(root)
        check_wheel(folder, version)
        (folder / "notes.md").write_text(notes + "\n")
        if given.tag:
            release(root, version)
    except ReleaseError as error:
        print(f"no release: {error}", file=sys.stderr)
        return 1
    for file in (*sorted(folder.glob("prfaas-*")), folder / "notes.md"):
        print(f"{file.relative_to(root)}  {file.stat().st_size:,} B")
    if given.tag:
        print(f"tagged v{version}; publish it: git push origin HEAD v{version}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
