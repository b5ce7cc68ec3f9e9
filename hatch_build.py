"""Compiled core and simulator: extension modules beside the files that they are made from.

    HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 pip wheel --no-deps .    a wheel with them
    python hatch_build.py DIRECTORY [LEVEL]    the package with them, for PYTHONPATH; LEVEL is gcc's

Without the variable a wheel has no extension modules. mypyc compiles what mypy has checked. A class
whose `__init__` is made at run time, by msgspec or a dataclass, would stay slow: such records are
written out in a copy of the files before mypyc sees it. Each line stays where it is, and a
traceback names the same one.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Hook = object
else:
    try:
        from hatchling.builders.hooks.plugin.interface import BuildHookInterface as Hook
    except ImportError:  # Run as a script.
        Hook = object


ROOT = Path(__file__).parent
COMPILED = (
    "core/admission",
    "core/cache",
    "core/control/threshold_loop.py",
    "core/dispatch",
    "core/request",
    "core/resilience",
    "core/routing",
    "core/transfer/link_goodput.py",
    "sim/engine",
    "sim/resources",
    "sim/system",
    "sim/workloads/requests.py",
    "traces/checks.py",
    "traces/formats/detect.py",
    "traces/lines.py",
    "traces/reader.py",
    "units.py",
)
"""Modules, and folders of them, within the package."""
SUBCLASSED = {"DispatcherBooks", "Executor"}
"""Compiled classes with subclasses that are not."""
ATTRIBUTES = "from mypy_extensions import mypyc_attr"
RECORD = "acyclic=True, free_list_len=1"
"""Of records, which no search for cycles has to visit, and which end as fast as they are made."""
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]+")
ENUM = re.compile(r"^class (\w+)\((?:Str|Int)?Enum\):", re.MULTILINE)
BASES = {"Record", "MutableRecord"}
ORDERED = {"bisect", "heapq"}
"""Modules of functions that are called often."""
NATIVE = '''"""Bases of compiled records, and `round` of a number that is compiled as such."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr


@mypyc_attr(acyclic=True)
class MutableRecord:
    """Fields with types that may change."""

    def __reduce__(self) -> Any:
        return _made, (type(self), {name: getattr(self, name) for name in _names(self)})

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in _names(self))
        return f"{type(self).__name__}({values})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and all(
            getattr(self, name) == getattr(other, name) for name in _names(self)
        )


@mypyc_attr(acyclic=True)
class Record(MutableRecord):
    """Named fields with types."""

    def __hash__(self) -> int:
        return hash(_values(self))

    def __lt__(self, other: Record) -> bool:
        return _values(self) < _values(other)

    def __ge__(self, other: Record) -> bool:
        return _values(self) >= _values(other)

    def _replace(self, **changes: Any) -> Self:
        """Return a copy with other values of some fields; TypeError if there is no such field."""
        values = {name: getattr(self, name) for name in _names(self)}
        values.update(changes)
        make: Any = type(self)
        found: Self = make(**values)
        return found


def nearest(value: float) -> int:
    """As `round`: the even one of two whole numbers that are equally near."""
    whole = int(value)
    rest = value - whole
    if rest > 0.5 or (rest == 0.5 and whole % 2 == 1):
        return whole + 1
    return whole - 1 if rest < -0.5 or (rest == -0.5 and whole % 2 == 1) else whole


def _made(kind: Any, values: dict[str, Any]) -> Any:
    return kind(**values)


def _values(record: Any) -> tuple[Any, ...]:
    return tuple([getattr(record, name) for name in _names(record)])


def _names(record: Any) -> tuple[str, ...]:
    names: tuple[str, ...] = record.__mypyc_attrs__
    return names
'''


def sources() -> Iterator[Path]:
    """Files to compile, within the package."""
    package = ROOT / "src" / "prfaas"
    for name in COMPILED:
        path = package / name
        found = [path] if path.suffix else sorted(path.rglob("*.py"))
        yield from (each.relative_to(package) for each in found if each.name != "__init__.py")


class Expansion:
    """The text of a module with its records written out."""

    def __init__(
        self, text: str, bases: Mapping[str, list[ast.AnnAssign]], enums: set[str]
    ) -> None:
        self._lines, self._tree, self._enums = text.splitlines(), ast.parse(text), enums
        self.records = dict(bases)
        """Fields of each record that is known, its base's first."""

    def run(self) -> str:
        """Return the text."""
        self._members()
        for node in self._tree.body:
            if isinstance(node, ast.ImportFrom) and node.module == "prfaas.records":
                self._import(node)
            elif isinstance(node, ast.ImportFrom) and node.module in ORDERED:
                names = [f"{each.name}: Final = _{each.name}" for each in node.names]
                line = self._lines[node.lineno - 1]
                for each in node.names:
                    line = re.sub(rf"\b{each.name}\b", f"{each.name} as _{each.name}", line)
                self._lines[node.lineno - 1] = "; ".join([line, *names])
            elif isinstance(node, ast.ClassDef):
                self._class(node)
            elif isinstance(node, ast.Assign):
                self._constant(node)
        first = "from __future__ import annotations"
        native = "from prfaas.native_records import nearest as round"
        line = f"{first}; from typing import TYPE_CHECKING, Final; {native}"
        self._lines[self._lines.index(first)] = line
        return "\n".join(self._lines) + "\n"

    def _import(self, node: ast.ImportFrom) -> None:
        native = [each.name for each in node.names if each.name in BASES]
        others = [each.name for each in node.names if each.name not in BASES]
        line = f"from prfaas.native_records import {', '.join(native)}" if native else ""
        if others:
            line += f"; from prfaas.records import {', '.join(others)}"
        self._lines[node.lineno - 1] = line.lstrip("; ")

    def _members(self) -> None:
        """A member of an imported enum is read in functions as a constant is."""
        ends = {
            each.name: (node.end_lineno or 0) - 1
            for node in self._tree.body
            if isinstance(node, ast.ImportFrom)
            for each in node.names
        }
        functions = [each for each in ast.walk(self._tree) if isinstance(each, ast.FunctionDef)]
        within = [each for f in functions for line in f.body for each in ast.walk(line)]
        patterns = {id(each.value) for each in within if isinstance(each, ast.MatchValue)}
        places = {
            (each.lineno - 1, each.col_offset): each
            for each in within
            if isinstance(each, ast.Attribute)
            and isinstance(each.value, ast.Name)
            and each.value.id in self._enums
            and CONSTANT.fullmatch(each.attr)
            and id(each) not in patterns
        }
        made = set()
        for (line, start), each in sorted(places.items(), key=itemgetter(0), reverse=True):
            member, text = ast.unparse(each), self._lines[line]
            if (end := ends.get(member.partition(".")[0])) is not None:
                constant = f"_{member.replace('.', '_')}"
                self._lines[line] = text[:start] + constant + text[start + len(member) :]
                made.add((end, f"; {constant}: Final = {member}"))
        for end, constant in sorted(made):
            self._lines[end] += constant

    def _constant(self, node: ast.Assign) -> None:
        """A name of a module that never changes is read without a look-up."""
        (target,), number = node.targets, node.lineno - 1
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts, strict=True))
            if all(CONSTANT.fullmatch(ast.unparse(name)) for name, _ in pairs):
                made = [f"{ast.unparse(each)}: Final = {ast.unparse(v)}" for each, v in pairs]
                self._lines[number] = "; ".join(made)
        elif CONSTANT.fullmatch(name := ast.unparse(target)):
            self._lines[number] = self._lines[number].replace(name, f"{name}: Final", 1)

    def _class(self, node: ast.ClassDef) -> None:
        base = node.bases[0].id if node.bases and isinstance(node.bases[0], ast.Name) else ""
        is_data = [each for each in node.decorator_list if _is_plain(each)]
        for decorator in node.decorator_list:
            # A frozen one cannot be pickled: mypyc sets its fields.
            line = self._lines[decorator.lineno - 1]
            self._lines[decorator.lineno - 1] = line.replace("frozen=True", "unsafe_hash=True")
        if node.name in SUBCLASSED:
            self._attribute(node, "allow_interpreted_subclasses=True")
        if base not in self.records and not is_data:
            return
        if base in self.records:
            self._attribute(node, RECORD)
        fields = [
            each
            for each in node.body
            if isinstance(each, ast.AnnAssign)
            and not ast.unparse(each.annotation).startswith("ClassVar")
        ]
        everything = self.records[node.name] = [*self.records.get(base, ()), *fields]
        for decorator in is_data:
            self._lines[decorator.lineno - 1] = ""
        self._lines[node.lineno - 1] = f"class {node.name}({base or 'object'}):"
        for each in fields:
            for number in range(each.lineno, (each.end_lineno or each.lineno) + 1):
                self._lines[number - 1] = ""
        if fields:
            names = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            made = _init(everything, calls_after="__post_init__" in names)
            self._lines[fields[0].lineno - 1] = f"    {made}"

    def _attribute(self, node: ast.ClassDef, attribute: str) -> None:
        """Have a class compiled in another way; there are two empty lines before it."""
        self._lines[node.lineno - 2] = f"@mypyc_attr({attribute})"
        self._lines[node.lineno - 3] = f"if TYPE_CHECKING: {ATTRIBUTES}"


def _is_plain(decorator: ast.expr) -> bool:
    """Return True for a dataclass of which `__init__` alone is made: it may change, and is equal to
    nothing but itself."""
    text = ast.unparse(decorator)
    return text.startswith("dataclass(") and "eq=False" in text and "frozen" not in text


def _init(fields: list[ast.AnnAssign], *, calls_after: bool) -> str:
    """`__init__` in one line."""
    parameters, body = ["self"], []
    for field in fields:
        name, kind, value = ast.unparse(field.target), ast.unparse(field.annotation), field.value
        made = name
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
            (factory,) = (each for each in value.keywords if each.arg == "default_factory")
            made = f"{ast.unparse(factory.value)}() if {name} is None else {name}"
            parameters.append(f"{name}: {kind} | None = None")
            body.append(f"self.{name}: {kind} = {made}")
        else:
            parameters.append(f"{name}: {kind}" + (f" = {ast.unparse(value)}" if value else ""))
            body.append(f"self.{name}: {kind} = {name}")
    body += ["self.__post_init__()"] if calls_after else []
    return f"def __init__({', '.join(parameters)}) -> None: {'; '.join(body)}"


def build(target: Path, level: str = "2") -> None:
    """Write the package with extension modules into a directory."""
    package = target / "prfaas"
    shutil.copytree(ROOT / "src" / "prfaas", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "native_records.py").write_text(NATIVE)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        shutil.copytree(package, work / "prfaas")
        expand(work / "prfaas")
        files = ["prfaas/native_records.py", *(f"prfaas/{each}" for each in sources())]
        (work / "mypy.ini").write_text("[mypy]\nignore_missing_imports = true\n")
        (work / "setup.py").write_text(SETUP.format(files=files, level=level))
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        # Of generated C, warnings are in vain.
        environment = {**os.environ, "CFLAGS": "-w -fvisibility=hidden", "MYPYPATH": str(work)}
        subprocess.run(command, cwd=work, check=True, env=environment)
        for each in work.glob("*.so"):
            shutil.copy2(each, target)
        for each in (work / "prfaas").rglob("*.so"):
            shutil.copy2(each, target / each.relative_to(work))


def expand(package: Path) -> None:
    """Write out the records of all files to compile."""
    records: dict[str, list[ast.AnnAssign]] = {name: [] for name in BASES}
    texts = {path: (package / path).read_text() for path in sources()}
    enums = set(ENUM.findall("".join(texts.values())))
    for _ in range(2):  # A base may be in a file that comes later.
        for path, text in texts.items():
            expansion = Expansion(text, records, enums)
            (package / path).write_text(expansion.run())
            records |= expansion.records


SETUP = """
from mypyc.build import mypycify
from setuptools import setup

options = ["--config-file=mypy.ini", *{files!r}]
setup(name="prfaas", ext_modules=mypycify(options, opt_level="{level}", debug_level="0"))
"""


class CustomBuildHook(Hook):
    """Adds the extension modules to a wheel; disabled unless asked for."""

    def dependencies(self) -> list[str]:
        """Return what the build needs."""
        return ["msgspec", "mypy", "numpy", "setuptools"]

    def initialize(self, _version: str, build_data: dict[str, Any]) -> None:
        """Build them."""
        made = Path(tempfile.mkdtemp())
        build(made)
        build_data["pure_python"], build_data["infer_tag"] = False, True
        for each in (*made.rglob("*.so"), made / "prfaas" / "native_records.py"):
            build_data["force_include"][str(each)] = str(each.relative_to(made))


if __name__ == "__main__":
    build(Path(sys.argv[1]), *sys.argv[2:])
