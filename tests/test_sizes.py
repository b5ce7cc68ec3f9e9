"""Sizes of classes: methods, lines, and what a constructor takes.

`sizes.txt` lists the classes that are larger. The list only gets shorter: a class that is not in it
fails, and so does an entry that no class needs. `python -m tests.test_sizes` writes it anew.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import prfaas

SOURCE = Path(prfaas.__file__).parent
LISTED = Path(__file__).with_name("sizes.txt")
LIMITS = {"methods": 30, "lines": 400, "parameters": 8, "callbacks": 2}
_ALIAS = re.compile(r"^(\w+)(?:: TypeAlias)? = Callable\[", re.MULTILINE)


def callback(sources: list[str]) -> re.Pattern[str]:
    """Pattern for annotations of callbacks: `Callable`, or a name that stands for one."""
    names = {name for source in sources for name in _ALIAS.findall(source)}
    return re.compile(rf"\b(?:{'|'.join(['Callable', *sorted(names)])})\b")


def sizes(found: ast.ClassDef, callbacks: re.Pattern[str]) -> dict[str, int]:
    """The sizes of a class, by what `LIMITS` limits."""
    methods = [
        each for each in found.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    taken = [
        argument
        for method in methods
        if method.name == "__init__"
        for argument in (*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs)[1:]
    ]
    annotations = [ast.unparse(each.annotation) for each in taken if each.annotation]
    return {
        "methods": len(methods),
        "lines": (found.end_lineno or found.lineno) - found.lineno + 1,
        "parameters": len(taken),
        "callbacks": sum(callbacks.search(each) is not None for each in annotations),
    }


def too_large(sources: dict[str, str]) -> Iterator[str]:
    """Classes beyond a limit, with what is beyond it; `sources` by name of the module."""
    callbacks = callback(list(sources.values()))
    for module, source in sorted(sources.items()):
        for found in ast.walk(ast.parse(source)):
            if isinstance(found, ast.ClassDef):
                for what, size in sizes(found, callbacks).items():
                    if size > LIMITS[what]:
                        yield f"{module}.{found.name} {what}"


def of_source() -> list[str]:
    """Those of the product."""
    files = SOURCE.rglob("*.py")
    return list(
        too_large(
            {
                ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts): file.read_text(
                    encoding="utf-8"
                )
                for file in files
            }
        )
    )


def test_no_class_is_larger_than_it_was() -> None:
    found, listed = set(of_source()), set(LISTED.read_text(encoding="utf-8").splitlines())

    assert not found - listed, f"split these; the limits are {LIMITS}"
    assert not listed - found, f"take these out of {LISTED.name}: python -m tests.test_sizes"


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("".join(f" def m{n}(self): ...\n" for n in range(31)), "methods"),
        (" x = 1\n" * 400, "lines"),
        (f" def __init__(self, {', '.join(f'p{n}' for n in range(9))}): ...\n", "parameters"),
        (
            " def __init__(self, a: Told, b: Callable[[], int], *, c: Told | None): ...\n",
            "callbacks",
        ),
    ],
)
def test_each_size_is_counted(body: str, what: str) -> None:
    source = f"Told = Callable[[int], None]\nclass Large:\n{body}"

    assert list(too_large({"a": source})) == [f"a.Large {what}"]


if __name__ == "__main__":
    LISTED.write_text("".join(f"{each}\n" for each in of_source()), encoding="utf-8")
