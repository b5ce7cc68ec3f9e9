"""Digests of a checkpoint: every byte of weights, configuration, tokenizer, template and code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blake3

from prfaas.engines.identity.file_digests import FileDigests
from prfaas.errors import ConfigError

_WEIGHTS = ({".safetensors"}, {".bin", ".pt", ".pth"}, {".gguf"})
"""Suffixes of weights, in the order in which vLLM prefers them."""
_NO_WEIGHTS = "training_args.bin"
_TOKENIZER_PARTS = ("token", "vocab", "merges", "tekken", "spm", "sentencepiece", "special_")
_PROCESSORS = ("processor_config", "image_processor", "video_processor", "feature_extractor")
"""Parts of the names of files with the settings of multimodal processors."""
_TEXTS = {".json", ".txt", ".model", ".tiktoken", ".jinja", ".py"}
COMMIT_CHARS = 12
_MODELSCOPE = "VLLM_USE_MODELSCOPE"


def checkpoint_digests(
    directory: Path, digests: FileDigests, *, weights: bool = True, all_formats: bool = False
) -> dict[str, str]:
    """Return digests of a checkpoint's files by kind: weights, config, tokenizer and so on.

    A file counts with its name, size and bytes. Readme, licence and other files that no engine
    reads do not count. Of weights in several formats the one that vLLM loads counts.

    Args:
        directory: The checkpoint, or one file that holds all of it (GGUF).
        digests: Digests of single files.
        weights: Read weights as well; False is for a separate tokenizer.
        all_formats: Count weights in every format, for a loader that may prefer another one.

    Raises:
        ConfigError: A file cannot be read or is missing.
    """
    kinds: dict[str, list[Path]] = {}
    files = [directory] if directory.is_file() else list(_files(directory))
    formats = (set[str]().union(*_WEIGHTS),) if all_formats else _WEIGHTS
    tensors = next((found for s in formats if (found := _with_suffix(files, s))), [])
    for path in files:
        kind = "weights" if path in tensors else _kind(path)
        if kind is not None and (weights or "weights" not in kind):
            kinds.setdefault(kind, []).append(path)
    if not kinds:
        raise ConfigError(f"{directory} holds no file of a checkpoint; name its directory")
    return {kind: _digest_of(directory, kinds[kind], digests) for kind in sorted(kinds)}


def _files(directory: Path) -> Iterator[Path]:
    yield from sorted(path for path in directory.iterdir() if path.is_file())
    templates = directory / "additional_chat_templates"
    if templates.is_dir():
        yield from sorted(templates.glob("*.jinja"))


def _with_suffix(files: list[Path], suffixes: set[str]) -> list[Path]:
    return [path for path in files if path.suffix in suffixes and path.name != _NO_WEIGHTS]


def _kind(path: Path) -> str | None:
    name = path.name.lower()
    if path.suffix not in _TEXTS or name.startswith(("readme", "license", "notice")):
        return None
    if path.suffix == ".py":
        return "code"
    if "chat_template" in name or path.suffix == ".jinja":
        return "chat_template"
    if path.suffix == ".json" and any(part in name for part in _PROCESSORS):
        return "processor"
    if path.suffix != ".json" or any(part in name for part in _TOKENIZER_PARTS):
        return "tokenizer"
    return "weights_index" if name.endswith(".index.json") else "config"


def _digest_of(directory: Path, files: list[Path], digests: FileDigests) -> str:
    hasher = blake3.blake3()
    for path in files:
        name = path.name if path == directory else str(path.relative_to(directory))
        hasher.update(f"{name}:{path.stat().st_size}:".encode())
        hasher.update(digests.digest(path))
    return hasher.hexdigest()[:32]


def find_checkpoint(name: str, revision: Any, cache: str | None = None) -> tuple[Path, str]:
    """Find the files that an engine loaded, and words for people: a name, and its commit.

    Args:
        name: Directory, file, or name at the Hugging Face Hub.
        revision: Of a name; None is the default branch as the local cache has it.
        cache: Download directory of the engine; None is the hub's usual cache.

    Raises:
        ConfigError: The name cannot be tied to files on this machine.
    """
    path = Path(name)
    if path.exists():
        is_snapshot = path.parent.name == "snapshots"
        commit = f"@{path.name[:COMMIT_CHARS]}" if is_snapshot else ""
        label = path.parent.parent.name.removeprefix("models--") if is_snapshot else path.name
        return path, f"{label.replace('--', '/')}{commit}"
    if os.environ.get(_MODELSCOPE, "").lower() == "true":
        raise ConfigError(
            f"model {name!r} is loaded from ModelScope ({_MODELSCOPE}=true), where its files are "
            "not looked for; start the engine with the checkpoint's directory"
        )
    # Imported where it is needed: it takes a second.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    wanted = getattr(revision, "resolved", None) or revision
    try:
        found = snapshot_download(
            name,
            revision=None if wanted is None else str(wanted),
            cache_dir=cache,
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        pinned = f"revision {wanted}" if wanted else "no revision"
        raise ConfigError(
            f"model {name!r} ({pinned}) cannot be tied to files on this machine, and two sites "
            "may hold different bytes under one name: its blocks cannot be shared. Start the "
            "engine with the checkpoint's directory, or with --revision COMMIT of a model that is "
            "in the local hub cache"
        ) from None
    return Path(found), f"{name}@{Path(found).name[:COMMIT_CHARS]}"
