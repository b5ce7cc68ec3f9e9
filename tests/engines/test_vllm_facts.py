"""What the engine side decides about blocks and checkpoints; needs vLLM to import, not to run."""

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(180)


def needing_vllm(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("vllm", reason="vLLM is not installed here")
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def layout() -> Any:
    return needing_vllm("prfaas.engines.vllm_layout")


FILES = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")


def a_checkpoint(directory: Path) -> Path:
    directory.mkdir()
    for name in FILES:
        (directory / name).write_bytes(f"content of {name}".encode() * 10)
    return directory


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", ["flip", "grow", "remove", "rename"])
def test_the_digest_changes_when_any_file_changes(
    layout: Any, tmp_path: Path, name: str, change: str
) -> None:
    one, other = a_checkpoint(tmp_path / "one"), a_checkpoint(tmp_path / "other")
    assert layout.model_digest(str(one), None) == layout.model_digest(str(other), None)
    path = other / name
    match change:
        case "flip":
            path.write_bytes(b"C" + path.read_bytes()[1:])
        case "grow":
            path.write_bytes(path.read_bytes() + b"!")
        case "remove":
            path.unlink()
        case "rename":
            path.rename(path.with_name(f"new-{name}"))
    assert layout.model_digest(str(one), None) != layout.model_digest(str(other), None)


def test_the_ends_of_a_file_too_large_to_read_count(
    layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "WHOLE_FILE_BYTES_MAX", 1000)
    monkeypatch.setattr(layout, "SAMPLE_BYTES", 10)
    digests = set()
    for place in (None, 0, 1000):
        directory = tmp_path / str(place)
        directory.mkdir()
        weights = bytearray(1001)
        if place is not None:
            weights[place] = 1
        (directory / "model.safetensors").write_bytes(weights)
        digests.add(layout.model_digest(str(directory), None))
    assert len(digests) == 3


def test_a_name_counts_with_its_revision(layout: Any) -> None:
    digests = {layout.model_digest("org/model", revision) for revision in (None, "a", "b")}
    assert len(digests | {layout.model_digest("org/other", None)}) == 4
