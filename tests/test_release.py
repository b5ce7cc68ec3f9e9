"""The release: what is refused, and what a tag has. `make dist` runs the build itself in CI."""

from __future__ import annotations

import re
import runpy
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

ROOT = Path(__file__).parents[1]
TOOL = SimpleNamespace(**runpy.run_path(str(ROOT / ".ci" / "release.py")))
NOTES = "- Something new.\n- Something else.\n\n### A part\n\nText."


def git(root: Path, *words: str) -> str:
    answer: str = TOOL.git(*words, root=root)
    return answer


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clean working tree with one commit, at version 0.1.0."""
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "a")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "a@example.net")
    root = tmp_path / "tree"
    root.mkdir()
    (root / "pyproject.toml").write_text('[project]\nversion = "0.1.0"\n')
    changes = (
        f"# Changelog\n\n## 0.1.0 (first release, unreleased)\n\n{NOTES}\n\n## 0.0.9\n\nOld.\n"
    )
    (root / "CHANGELOG.md").write_text(changes)
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "All")
    return root


def wheel_in(folder: Path, version: str, without: str = "", more: str = "") -> Path:
    """A wheel and an sdist as the build makes them."""
    about = f"prfaas-{version}.dist-info"
    head = f"Metadata-Version: 2.4\nName: prfaas\nVersion: {version}\n"
    metadata = f"{head}Description-Content-Type: text/markdown\n\n# prfaas\n"
    names = [name.format(version=version) for name in TOOL.NEEDED]
    with zipfile.ZipFile(folder / f"prfaas-{version}-py3-none-any.whl", "w") as archive:
        for name in (*names, more):
            if name and name != without:
                archive.writestr(name, "")
        archive.writestr(f"{about}/METADATA", metadata)
    (folder / "pyproject.toml").write_text("")
    with tarfile.open(folder / f"prfaas-{version}.tar.gz", "w:gz") as archive_:
        archive_.add(folder / "pyproject.toml", f"prfaas-{version}/pyproject.toml")
    return folder


def test_a_release_dates_the_changelog_and_tags_with_its_notes(tree: Path) -> None:
    TOOL.check_tree(tree, "0.1.0")
    TOOL.release(tree, "0.1.0")
    heading = (tree / "CHANGELOG.md").read_text().splitlines()[2]
    assert re.fullmatch(r"## 0\.1\.0 \(20\d\d-\d\d-\d\d\)", heading)
    assert git(tree, "status", "--porcelain") == ""
    assert "Something new." in git(tree, "tag", "-n99", "--list", "v0.1.0")
    assert "Old." not in git(tree, "tag", "-n99", "--list", "v0.1.0")


def test_what_cannot_be_released_is_refused_with_the_next_step(tree: Path) -> None:
    for version, words in (("0.2.0", "pyproject.toml has version 0.1.0"), ("one", "no version")):
        with pytest.raises(TOOL.ReleaseError, match=words):
            TOOL.check_tree(tree, version)
    with pytest.raises(TOOL.ReleaseError, match=r"no section `## 0\.3`"):
        TOOL.section((tree / "CHANGELOG.md").read_text(), "0.3")
    (tree / "left.txt").write_text("")
    with pytest.raises(TOOL.ReleaseError, match=r"1 files are not committed, left\.txt first"):
        TOOL.check_tree(tree, "0.1.0")
    (tree / "left.txt").unlink()
    TOOL.release(tree, "0.1.0")
    with pytest.raises(TOOL.ReleaseError, match=r"the tag v0\.1\.0 exists"):
        TOOL.check_tree(tree, "0.1.0")


def test_a_wheel_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    TOOL.check_wheel(wheel_in(tmp_path, "0.1.0"), "0.1.0")
    with pytest.raises(TOOL.ReleaseError, match=r"was not built"):
        TOOL.check_wheel(tmp_path, "0.2.0")
    with pytest.raises(TOOL.ReleaseError, match=r"lacks prfaas/py\.typed"):
        TOOL.check_wheel(wheel_in(tmp_path, "0.1.0", without="prfaas/py.typed"), "0.1.0")
    with pytest.raises(TOOL.ReleaseError, match=r"tests/test_a\.py, which is not of the package"):
        TOOL.check_wheel(wheel_in(tmp_path, "0.1.0", more="tests/test_a.py"), "0.1.0")


def test_this_version_has_its_notes() -> None:
    _, notes = TOOL.section((ROOT / "CHANGELOG.md").read_text(), TOOL.declared(ROOT))
    assert len(notes.split()) > 100


def test_workflows_run_targets_and_files_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    files = sorted((ROOT / ".github").rglob("*.yml"))
    assert len(files) >= 5
    for file in files:
        text = file.read_text()
        assert isinstance(yaml.safe_load(text), dict), file.name
        for target in re.findall(r"\bmake ([a-z-]+)", text):
            assert f"\n{target}:" in makefile, target
        for place in re.findall(r"(?:run: |file: |path: )(\.ci/\w+|requirements/[\w.]+)", text):
            assert (ROOT / place).exists(), place
