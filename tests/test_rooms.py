"""Packages of the source: few modules each, a docstring, no import cycle."""

from __future__ import annotations

import ast
import re
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import prfaas

SOURCE = Path(prfaas.__file__).parent
MODULES_MAX = 15
PACKAGES = sorted(file.parent for file in SOURCE.rglob("__init__.py"))


def name_of(file: Path) -> str:
    """The dotted name of a module or package."""
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in SOURCE.rglob("*.py")}


def crowded(counts: dict[str, int]) -> list[str]:
    """Packages with too many modules, in words."""
    return [
        f"{package} has {count} modules, more than {MODULES_MAX}: group some in a sub-package, "
        "see 'Rooms' in ARCHITECTURE.md"
        for package, count in sorted(counts.items())
        if count > MODULES_MAX
    ]


def imported_by(file: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of `modules` that a file imports, those for type checkers included."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in whole}
    return found & modules.keys()


def circle(imports: dict[str, set[str]]) -> list[str] | None:
    """One circle of imports, if there is any."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return None


def test_a_package_holds_few_modules() -> None:
    counts = {
        name_of(package / "__init__.py"): len(list(package.glob("*.py"))) - 1
        for package in PACKAGES
    }

    assert len(counts) > 40
    assert not crowded(counts)


def test_a_crowded_package_is_named_with_the_place_to_look() -> None:
    (found,) = crowded({"prfaas.gateway": MODULES_MAX + 1, "prfaas.core": MODULES_MAX})

    assert found.startswith("prfaas.gateway has 16 modules")
    assert "ARCHITECTURE.md" in found


def test_every_package_says_what_it_holds() -> None:
    silent = [
        str(package)
        for package in PACKAGES
        if not ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8")))
    ]

    assert not silent


def test_the_architecture_names_every_package() -> None:
    page = (SOURCE.parents[1] / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = page.partition("## Rooms")[2].partition("## ")[0]
    rooms = {package.name for package in PACKAGES if package.parent == SOURCE}

    assert not [room for room in rooms if f"`{room}`" not in table]


def test_every_path_of_the_architecture_exists() -> None:
    page = (SOURCE.parents[1] / "ARCHITECTURE.md").read_text(encoding="utf-8")
    places = re.findall(r"`([a-z_]+/[\w/]+(?:\.py)?)`", page)
    inside = [place for place in places if not place.startswith(("src/", "tests/"))]

    assert len(inside) > 40
    assert not [place for place in inside if not (SOURCE / place).exists()]


def test_the_order_of_imports_in_the_architecture_is_the_contract() -> None:
    settings = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    page = (SOURCE.parents[1] / "ARCHITECTURE.md").read_text(encoding="utf-8")
    order = " ".join(page.partition("Imports go one way: `")[2].partition("`")[0].split())
    shown = [set(layer.split(" | ")) for layer in order.split(" > ")]
    named = set().union(*shown)
    rooms = {package.name for package in PACKAGES if package.parent == SOURCE}

    assert not rooms - named
    assert shown == [found for layer in layers if (found := named & set(layer.split(" | ")))]


def test_no_module_imports_itself_by_way_of_others() -> None:
    imports = {name: imported_by(file, MODULES) - {name} for name, file in MODULES.items()}

    assert circle(imports) is None


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) is not None
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) is None
