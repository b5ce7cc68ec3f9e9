"""The parts of vLLM's source that hold the names of `vllm_compat`, recorded a file a version.

Written from the Python tree of a version, which needs no vLLM that runs:

    python -m tests.engines.vllm_trees.recorded DIRECTORY VERSION
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

from prfaas.engines.vllm_compat import NAMES, minor_of

HERE = Path(__file__).parent


def file_of(minor: str) -> Path:
    return HERE / f"vllm-{minor}.json"


def write_tree(minor: str, root: Path) -> Path:
    """Write the recorded sources of a version as files."""
    for name, source in json.loads(file_of(minor).read_text()).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root


def reduced(root: Path) -> dict[str, str]:
    """Classes and functions of `NAMES` in a tree, without their bodies."""
    return {file: _reduced(root / file, file) for file in sorted({name.file for name in NAMES})}


def _reduced(path: Path, file: str) -> str:
    wanted = [name.path.split(".") for name in NAMES if name.file == file]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lines: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and [node.name] in wanted:
            lines += [_signature(node), "    ..."]
        elif isinstance(node, ast.ClassDef):
            members = {path[1] for path in wanted if path[0] == node.name and len(path) > 1}
            if members:
                lines += [f"class {node.name}:", *_members(node, members)]
    return "\n".join(lines) + "\n"


def _members(node: ast.ClassDef, wanted: set[str]) -> list[str]:
    lines: list[str] = []
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) in wanted:
            lines.append(f"    {ast.unparse(each.target)}: object")
        elif isinstance(each, ast.FunctionDef):
            own = {target for target in _targets(each) if target.removeprefix("self.") in wanted}
            if each.name in wanted or own:
                lines.append(f"    {_signature(each)}")
                lines += [f"        {target} = None" for target in sorted(own)] or ["        ..."]
    return lines


def _targets(node: ast.FunctionDef) -> list[str]:
    found: list[ast.expr] = []
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assign):
            found += inner.targets
        elif isinstance(inner, ast.AnnAssign):
            found.append(inner.target)
    return [text for each in found if (text := ast.unparse(each)).startswith("self.")]


def _signature(node: ast.FunctionDef) -> str:
    arguments = node.args
    for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        each.annotation = None
    for other in (arguments.vararg, arguments.kwarg):
        if other is not None:
            other.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [d and ast.Constant(None) for d in arguments.kw_defaults]
    return f"def {node.name}({ast.unparse(arguments)}):"


if __name__ == "__main__":
    found = reduced(Path(sys.argv[1]))
    text = json.dumps(found, indent=1, sort_keys=True)
    file_of(minor_of(sys.argv[2])).write_text(f"{text}\n")
