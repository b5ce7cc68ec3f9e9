"""What the engine side decides about blocks and checkpoints; needs vLLM to import, not to run."""

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.blocks import CacheGroup, GroupKind

pytestmark = pytest.mark.timeout(180)
FULL = CacheGroup(0, GroupKind.FULL_ATTENTION, 16, 1)
STATE = CacheGroup(1, GroupKind.LINEAR_STATE, 64, 1)
WINDOW = CacheGroup(2, GroupKind.SLIDING_WINDOW, 16, 1, 40)


def needing_vllm(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("vllm", reason="vLLM is not installed here")
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def tier() -> Any:
    return needing_vllm("prfaas.engines.vllm_tier")


@pytest.fixture(scope="module")
def layout() -> Any:
    return needing_vllm("prfaas.engines.vllm_layout")


@pytest.mark.parametrize(
    ("group", "end_token", "have", "final", "worth"),
    [
        (FULL, 16, 0, 128, True),
        (FULL, 128, 0, 128, True),
        (FULL, 144, 0, 128, False),
        (FULL, 64, 64, 128, False),
        (FULL, 80, 64, 128, True),
        (STATE, 64, 0, 128, False),
        (STATE, 128, 0, 128, True),
        (STATE, 192, 0, 128, False),
        (STATE, 128, 128, 128, False),
        (WINDOW, 80, 0, 128, False),
        (WINDOW, 96, 0, 128, True),
        (WINDOW, 128, 0, 128, True),
        (WINDOW, 96, 112, 128, False),
        (FULL, 16, 0, 0, False),
    ],
)
def test_only_what_the_other_side_can_use_is_sent(
    tier: Any, group: CacheGroup, end_token: int, have: int, final: int, worth: bool
) -> None:
    sent = tier.is_worth_sending(group, end_token, have_tokens=have, final_tokens=final)
    assert sent is worth


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
