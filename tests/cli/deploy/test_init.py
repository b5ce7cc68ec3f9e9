"""`prfaas init`, and the files that prfaas comes with."""

from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.cli.deploy.init_command import KITS
from prfaas.limited_files import SHIPPED_ROOT, file_or_shipped, shipped_file
from tests.cli.conftest import Prfaas


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(folder: Path) -> dict[Path, str]:
    return {
        path.relative_to(folder): path.read_text() for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("kit", KITS)
def test_a_kit_has_comments_and_leads_nowhere_else(prfaas: Prfaas, folder: Path, kit: str) -> None:
    code, output, _ = prfaas("init", kit)
    assert code == 0
    assert f"next: {KITS[kit].then}" in output
    files = written(folder)
    named = [word for word in KITS[kit].then.split() if word.endswith((".toml", ".yaml"))]
    assert named
    for name in named:
        assert "# " in files[Path(name)]
        assert f"examples/{name}" not in files[Path(name)]


@pytest.mark.parametrize("kit", ["timing", "two-sites", "laptop"])
def test_a_deployment_passes_the_check(prfaas: Prfaas, folder: Path, kit: str) -> None:
    prfaas("init", kit)
    code, output, errors = prfaas("check", f"{kit}.toml")
    # The other hosts of two sites are not here.
    assert code == (1 if kit == "two-sites" else 0), errors
    assert code == 1 or f"{kit}.toml: ok" in output
    assert "using the example" not in errors


def test_what_is_there_is_kept(prfaas: Prfaas, folder: Path) -> None:
    (folder / "plan").mkdir()
    mine = folder / "plan" / "paper-case-study.toml"
    mine.write_text("mine")
    code, _, errors = prfaas("init", "timing")
    assert code == 2
    assert "plan/paper-case-study.toml exists already, and nothing was written" in errors
    assert "--force" in errors
    assert written(folder) == {mine.relative_to(folder): "mine"}
    assert prfaas("init", "timing", "--force")[0] == 0
    assert mine.read_text() != "mine"
    # Two kits have files in common.
    assert prfaas("init", "plan")[0] == 0


def test_a_folder_in_the_place_of_a_file_is_one_line(prfaas: Prfaas, folder: Path) -> None:
    (folder / "laptop.toml").mkdir()
    assert "laptop.toml exists already" in prfaas("init", "laptop")[2]
    code, _, errors = prfaas("init", "laptop", "--force")
    assert code == 2
    assert errors == (
        "prfaas: laptop.toml cannot be written: Is a directory; go to a folder of yours\n"
    )


def test_the_files_of_a_kit_are_shipped() -> None:
    for kit in KITS.values():
        for name in kit.files:
            assert (SHIPPED_ROOT / name).exists(), name


@pytest.mark.parametrize(
    ("path", "kind", "there"),
    [
        ("laptop", "", "examples/laptop.toml"),
        ("examples/laptop.toml", "", "examples/laptop.toml"),
        ("paper-case-study", "plan", "examples/plan/paper-case-study.toml"),
        ("four-clusters", "plan", "examples/plan/four-clusters.toml"),
        ("four-clusters", "sim", "examples/sim/four-clusters.toml"),
        ("servegen_rates.csv", "sim/traces", "examples/sim/traces/servegen_rates.csv"),
        ("dashboards/alerts.yml", "", "dashboards/alerts.yml"),
        ("nowhere", "plan", None),
        ("../examples/laptop.toml", "", None),
        ("/laptop", "", None),
        ("long" * 100, "", None),
        ("nul\0", "", None),
        (".", "", None),
        ("examples", "", None),
    ],
)
def test_a_shipped_file_is_found_by_its_name(
    folder: Path, path: str, kind: str, there: str | None
) -> None:
    expected = None if there is None else SHIPPED_ROOT / there
    assert shipped_file(Path(path), kind) == expected


def test_a_file_of_that_name_comes_first(folder: Path) -> None:
    (folder / "laptop").touch()
    assert shipped_file(Path("laptop")) is None
    assert file_or_shipped(Path("laptop")) == Path("laptop")
