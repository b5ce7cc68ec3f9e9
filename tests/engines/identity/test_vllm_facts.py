"""Names of vLLM that prfaas depends on, in the supported versions.

Held against recorded signatures of every supported version, and against the vLLM that is
installed. To hold them against another version, put its Python tree first:

    pip download --no-deps --dest /tmp/vllm vllm==0.33.0
    unzip -q '/tmp/vllm/vllm-0.33.0-*.whl' '*.py' -d /tmp/vllm/tree
    PYTHONPATH=/tmp/vllm/tree python -m pytest tests/engines/identity/test_vllm_facts.py \
        tests/engines/identity/test_counted.py
"""

from __future__ import annotations

import ast
import inspect
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prfaas.engines import vllm_compat
from prfaas.engines.vllm_compat import (
    NAMES,
    VERSIONS,
    Name,
    check_version,
    check_vllm,
    installed_tree,
    missing_names,
)
from prfaas.errors import ConfigError
from tests.engines.vllm_modules import needing_vllm
from tests.engines.vllm_trees.recorded import file_of, reduced, write_tree

pytestmark = pytest.mark.timeout(300)
ENGINES = Path(vllm_compat.__file__).parent
NEWEST = VERSIONS[-1]


@pytest.mark.parametrize("minor", VERSIONS)
def test_every_name_is_in_every_supported_version(tmp_path: Path, minor: str) -> None:
    assert missing_names(write_tree(minor, tmp_path), minor) == []


def test_the_recorded_signatures_are_those_of_the_vllm_that_is_here() -> None:
    tree = installed_tree()
    if tree is None:
        pytest.skip("vLLM is not installed here")
    minor = vllm_compat.minor_of(needing_vllm("vllm").__version__)
    assert missing_names(tree, minor) == []
    assert reduced(tree) == json.loads(file_of(minor).read_text()), (
        "run python -m tests.engines.vllm_trees.recorded DIRECTORY VERSION, and look at what "
        "changed"
    )


def test_the_modules_of_the_connector_import_with_the_vllm_that_is_here() -> None:
    needing_vllm("vllm")
    for name in ("vllm_connector", "vllm_tier", "vllm_cpu", "vllm_layout"):
        needing_vllm(f"prfaas.engines.{name}")


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_a_name_that_is_gone_is_named(tmp_path: Path, name: Name) -> None:
    tree = write_tree(NEWEST, tmp_path)
    last = name.path.rpartition(".")[2]
    path = tree / name.file
    path.write_text(path.read_text().replace(last, "renamed"))
    missing = missing_names(tree, NEWEST)
    assert f"{name.file} has no {name.path}" in missing


@pytest.mark.parametrize(
    ("file", "before", "after", "words"),
    [
        (
            "v1/core/kv_cache_utils.py",
            "(hash_fn)",
            "(hasher)",
            "resolve_none_hash_seed of v1/core/kv_cache_utils.py has no argument hash_fn",
        ),
        (
            "v1/kv_offload/tiering/base.py",
            "def submit_load(self, job_metadata)",
            "def submit_load(self, job_metadata, deadline)",
            "SecondaryTierManager.submit_load of v1/kv_offload/tiering/base.py needs deadline",
        ),
        (
            "v1/kv_offload/base.py",
            "expedited=None",
            "expedited",
            "OffloadingWorker.submit_load of v1/kv_offload/base.py needs expedited",
        ),
    ],
)
def test_another_signature_is_named(
    tmp_path: Path, file: str, before: str, after: str, words: str
) -> None:
    tree = write_tree(NEWEST, tmp_path)
    source = (tree / file).read_text()
    assert before in source
    (tree / file).write_text(source.replace(before, after))
    assert missing_names(tree, NEWEST) == [words]


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    tree = write_tree(NEWEST, tmp_path)
    (tree / "v1/kv_offload/base.py").unlink()
    [words] = missing_names(tree, NEWEST)
    assert words == "v1/kv_offload/base.py cannot be read (FileNotFoundError)"


@pytest.mark.parametrize("version", ["0.31.4", "0.34.0", "0.34.0rc1+cpu", "1.0.0", "0.3", "dev"])
def test_an_unknown_version_is_refused_with_what_to_do(version: str) -> None:
    with pytest.raises(ConfigError, match=r"Install vllm==0\.33\.\* or vllm==0\.32\.\*, or a ver"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.1.dev7+g0123.cpu", "0.32.9+cpu"])
def test_builds_of_supported_versions_are_accepted(version: str) -> None:
    check_version(version)


def test_an_engine_that_is_not_as_released_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = needing_vllm("vllm")
    check_vllm()
    tree = write_tree(NEWEST, tmp_path)
    (tree / "config/cache.py").write_text("class CacheConfig: ...\n")
    monkeypatch.setattr(vllm, "__file__", str(tree / "__init__.py"))
    monkeypatch.setattr(vllm, "__version__", f"{NEWEST}.0")
    with pytest.raises(ConfigError, match=r"not as released: config/cache\.py has no Cache"):
        check_vllm()


def test_the_connector_refuses_an_unknown_version_before_it_imports_its_names() -> None:
    needing_vllm("vllm")
    program = (
        "import sys, vllm\n"
        "vllm.__version__ = '0.99.0'\n"
        "sys.modules['vllm.config'] = None\n"  # an import of it would fail
        "import prfaas.engines.vllm_connector\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "ConfigError: vLLM 0.99.0 is not supported" in done.stderr


@pytest.mark.parametrize("minor", VERSIONS)
def test_our_methods_take_what_vllm_passes(tmp_path: Path, minor: str) -> None:
    """Every argument of the method that is overridden, in each version."""
    tree = write_tree(minor, tmp_path)
    pairs = (
        ("v1/kv_offload/tiering/base.py", "SecondaryTierManager", "vllm_tier", "PrfaasTier"),
        ("v1/kv_offload/base.py", "OffloadingWorker", "vllm_cpu", "MemmoveWorker"),
    )
    for file, base, module, ours in pairs:
        kind = getattr(needing_vllm(f"prfaas.engines.{module}"), ours)
        for path, node in vllm_compat._definitions(ast.parse((tree / file).read_text())).items():
            owner, _, method = path.partition(".")
            if owner == base and isinstance(node, ast.FunctionDef) and method != "__init__":
                arguments, _ = vllm_compat.arguments_of(node)
                inspect.signature(getattr(kind, method)).bind(None, *arguments)
                inspect.signature(getattr(kind, method)).bind(None, **dict.fromkeys(arguments))


def test_the_tier_is_called_by_the_schedulers_thread_alone() -> None:
    """vLLM 0.33 polls tiers from another thread if they set this."""
    tier = needing_vllm("prfaas.engines.vllm_tier").PrfaasTier
    assert tier.tolerates_off_thread_polling is False


def private_uses(source: str) -> set[str]:
    """Private names of other objects than `self` that a module uses."""
    tree = ast.parse(source)
    found = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr[0] == "_"
        and not node.attr.startswith("__")
        and ast.unparse(node.value) not in ("self", "cls")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
            found |= {alias.name for alias in node.names if alias.name[0] == "_"}
    listed = {name.path.rpartition(".")[2] for name in NAMES}
    mine = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return found | {name for name in mine & listed if name[0] == "_" and name[1] != "_"}


def test_private_names_are_used_in_one_module() -> None:
    modules = [file for file in ENGINES.rglob("*.py") if "from vllm" in file.read_text()]
    assert len(modules) > 5
    for file in modules:
        if file.name != "vllm_compat.py":
            assert private_uses(file.read_text()) == set(), file
    # Of a named tuple `_replace` is public.
    listed = {name.path.rpartition(".")[2] for name in NAMES} | {"_replace"}
    assert private_uses((ENGINES / "vllm_compat.py").read_text()) <= listed


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[Any]:
    """vLLM's tiering spec with host memory of 8 KiB in one file."""
    with (tmp_path / "region").open("w+b") as file:
        file.truncate(8192)
        region = SimpleNamespace(fd=file.fileno(), total_size_bytes=8192)
        yield SimpleNamespace(_scheduler_mmap=region)


def test_a_region_of_several_files_is_refused(spec: Any) -> None:
    region = spec._scheduler_mmap
    assert vllm_compat.region_descriptor(spec) == region.fd
    region._segments = [("a", 0, 8192)]
    assert vllm_compat.region_descriptor(spec) == region.fd
    region._segments = [("a", 0, 4096), ("a.1", 4096, 4096)]
    with pytest.raises(ConfigError, match="lies in 2 files, and a pool node maps one"):
        vllm_compat.region_descriptor(spec)


def test_host_memory_of_another_connector_is_refused(spec: Any) -> None:
    spec._scheduler_mmap.total_size_bytes = 4096
    with pytest.raises(ConfigError, match="8192 bytes instead of 4096: another connector"):
        vllm_compat.region_descriptor(spec)


def test_what_prfaas_logs_in_an_engine_goes_where_vllms_log_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM sets up its own logger alone, and Python shows only warnings of the others."""
    program: dict[str, Any] = {}
    lines: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(record.getMessage()))
    ours, theirs, root = (logging.getLogger(name) for name in ("prfaas", "vllm", ""))
    for logger in (ours, theirs, root):
        program[logger.name] = (logger.handlers, logger.level)
    try:
        root.handlers, ours.handlers, theirs.handlers = [], [], [handler]
        theirs.setLevel(logging.INFO)
        for _ in range(2):
            vllm_compat.log_with_vllm()
        logging.getLogger("prfaas.engines.vllm_layout").info("KV layout")
        assert lines == ["KV layout"]
    finally:
        for logger in (ours, theirs, root):
            logger.handlers, level = program[logger.name]
            logger.setLevel(level)
