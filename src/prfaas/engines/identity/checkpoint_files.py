"""Digests of a checkpoint: every byte of weights, configuration, tokenizer, template and code.

Digests of files that have not changed are kept, in `prfaas/file-digests` under `$XDG_CACHE_HOME`
(`~/.cache` if that is not set): one small file a digest, named by the file's path, device, inode,
size, and times of modification and change. Only the user that the engine runs as can write there; a
directory that others could write to, or that is a symbolic link, is not used, nor what somebody
puts in its place meanwhile. A file's change time cannot be set back, so a file that was written to
is read again even if its size and modification time were restored.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import blake3
import msgspec

from prfaas.errors import ConfigError

log = logging.getLogger(__name__)


PAUSE_NS = 10 * 10**9
"""Least time between two lines about one file."""


@dataclass(slots=True)
class ReadProgress:
    """Counts of files that were read, and of files whose digest was kept since an earlier start."""

    num_files: int = 0
    """Files that were read."""
    num_bytes: int = 0
    """Bytes of these files."""
    read_ns: int = 0
    """Time that this took."""
    num_kept: int = 0
    """Files whose kept digest was used."""
    is_kept: bool = True
    """False if digests cannot be stored, so that every start reads all files."""
    now_ns: Callable[[], int] = field(default=time.monotonic_ns, repr=False)

    def file(self, name: str, size: int) -> FileProgress:
        """Return the progress of a file that is about to be read."""
        now_ns = self.now_ns()
        return FileProgress(self, name, size, now_ns, now_ns)

    def log_summary(self) -> None:
        """Log the cost of the digests, once a checkpoint is known."""
        if self.num_files:
            log.info(
                "digests of the model's files: %.2f GB in %d files read in %.1f s, %.2f GB/s; "
                "%d files unchanged since an earlier start",
                self.num_bytes / 1e9,
                self.num_files,
                self.read_ns / 1e9,
                self.num_bytes / max(self.read_ns, 1),
                self.num_kept,
            )
        if self.num_files and not self.is_kept:
            log.warning(
                "these digests cannot be kept, and every start reads all files again: set "
                "XDG_CACHE_HOME to a directory that this user alone can write to"
            )


@dataclass(slots=True)
class FileProgress:
    """Progress of one file; a line at most every PAUSE_NS."""

    total: ReadProgress
    name: str
    size: int
    started_ns: int
    logged_ns: int
    num_bytes: int = 0

    def advance(self, num_bytes: int) -> None:
        """Count bytes that were read and digested."""
        self.num_bytes += num_bytes
        now_ns = self.total.now_ns()
        if now_ns - self.logged_ns >= PAUSE_NS:
            self.logged_ns = now_ns
            log.info(
                "digest of %s: %.2f of %.2f GB, %.2f GB/s",
                self.name,
                self.num_bytes / 1e9,
                self.size / 1e9,
                self.num_bytes / max(now_ns - self.started_ns, 1),
            )

    def finish(self) -> None:
        """Add the file to the total."""
        self.total.num_files += 1
        self.total.num_bytes += self.num_bytes
        self.total.read_ns += self.total.now_ns() - self.started_ns


CHUNK_BYTES = 64 << 20
SETTLED_NS = 2 * 10**9
ENTRIES_MAX = 10_000
ENTRY_BYTES_MAX = 256
_LOCK = "lock"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_directory() -> Path | None:
    """Directory of stored digests; None for a user without a home directory, whose digests are not
    stored."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(base) if base else Path.home() / ".cache"
    except RuntimeError:
        return None
    return root / "prfaas" / "file-digests"


class FileDigests:
    """BLAKE3 digests of whole files.

    Args:
        directory: Where they are kept; it is made if it is missing.
        settled_ns: Minimum age of a file whose digest is kept, ns: timestamps are coarse.
        entries_max: Kept digests; beyond it the oldest go.

    Attributes:
        progress: Files and bytes that were read so far.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        settled_ns: int = SETTLED_NS,
        entries_max: int = ENTRIES_MAX,
    ) -> None:
        self._settled_ns, self._entries_max = settled_ns, entries_max
        self._directory = directory if directory is not None else cache_directory()
        self.progress = ReadProgress()

    def digest(self, path: Path) -> bytes:
        """Return the digest of all bytes of a file, 32 bytes; ConfigError if the file cannot be
        read, or changed while it was read."""
        try:
            with (
                path.resolve(strict=True).open("rb", buffering=0) as file,
                _opened(self._directory, self._entries_max) as kept,
            ):
                self.progress.is_kept = kept is not None
                return _digest(file, path.resolve(), kept, self._settled_ns, self.progress)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read: {error.strerror or error}; the engine's blocks are named "
                "by every byte of its model, so let it read all files of the checkpoint"
            ) from None


class _Kept:
    """The directory of digests, by a descriptor.

    What lies at its path may be swapped by whoever can write to a directory above it; what a
    descriptor leads to cannot.
    """

    def __init__(self, descriptor: int, entries_max: int) -> None:
        self._at = descriptor
        self._entries_max = entries_max

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Lock for the digests of a checkpoint: one engine of the machine reads it, and the others
        use its digests."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # Without the lock it takes longer.
                lock = stack.enter_context(self._file(_LOCK, os.O_RDWR | os.O_CREAT))
                _lock(lock)
            yield

    def get(self, entry: str) -> bytes | None:
        """Return the digest that was kept under a name; None without any."""
        with contextlib.suppress(OSError, ValueError), self._file(entry, os.O_RDONLY) as file:
            digest = bytes.fromhex(os.read(file, ENTRY_BYTES_MAX).decode())
            return digest if len(digest) == blake3.blake3.digest_size else None
        return None

    def put(self, entry: str, digest: bytes) -> None:
        """Write an entry whole or not at all. A disk that is full costs time at the next start."""
        with contextlib.suppress(OSError):
            for oldest in self._surplus():
                os.unlink(oldest, dir_fd=self._at)
            fresh = f"{entry}.{os.getpid()}"
            with self._file(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
                os.write(file, digest.hex().encode())
            os.replace(fresh, entry, src_dir_fd=self._at, dst_dir_fd=self._at)

    def _surplus(self) -> list[str]:
        with os.scandir(self._at) as found:
            entries = [
                (entry.stat(follow_symlinks=False).st_mtime_ns, entry.name)
                for entry in found
                if entry.name != _LOCK
            ]
        return [name for _, name in sorted(entries)[: max(0, len(entries) - self._entries_max)]]

    @contextlib.contextmanager
    def _file(self, name: str, flags: int) -> Iterator[int]:
        file = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._at)
        try:
            yield file
        finally:
            os.close(file)


@contextlib.contextmanager
def _opened(directory: Path | None, entries_max: int) -> Iterator[_Kept | None]:
    """The directory if only this user can write there; None if it cannot be used."""
    with contextlib.ExitStack() as stack:
        kept = None
        if directory is not None:
            with contextlib.suppress(OSError):
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptor = os.open(directory, flags)
                stack.callback(os.close, descriptor)
                found = os.fstat(descriptor)
                if found.st_uid == os.geteuid() and not found.st_mode & _OTHERS_WRITE:
                    kept = _Kept(descriptor, entries_max)
        yield kept


def _lock(lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.info("waiting for another process of this user that reads files of a model")
        fcntl.flock(lock, fcntl.LOCK_EX)


def _digest(
    file: Any, path: Path, kept: _Kept | None, settled_ns: int, progress: ReadProgress
) -> bytes:
    before = os.fstat(file.fileno())
    if kept is None:
        return _read_whole(file, path, before, progress)
    entry = blake3.blake3(_key(path, before)).hexdigest()
    if (found := kept.get(entry)) is not None:
        progress.num_kept += 1
        return found
    with kept.alone():
        if (found := kept.get(entry)) is not None:
            progress.num_kept += 1
            return found
        started_ns = time.time_ns()
        digest = _read_whole(file, path, before, progress)
        changed_ns = max(before.st_mtime_ns, before.st_ctime_ns)
        if started_ns - changed_ns >= settled_ns:
            kept.put(entry, digest)
    return digest


def _read_whole(file: Any, path: Path, before: os.stat_result, progress: ReadProgress) -> bytes:
    digest = _read(file, progress.file(path.name, before.st_size))
    if _key(path, os.fstat(file.fileno())) != _key(path, before):
        raise ConfigError(
            f"{path} was changed while its digest was computed; start the engine again "
            "when the checkpoint is complete"
        )
    return digest


def _key(path: Path, found: os.stat_result) -> bytes:
    numbers = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return msgspec.json.encode([str(path), *numbers])


def _read(file: Any, progress: FileProgress) -> bytes:
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    buffer = memoryview(bytearray(min(CHUNK_BYTES, progress.size + 1)))
    while length := file.readinto(buffer):
        hasher.update(buffer[:length])
        progress.advance(length)
    progress.finish()
    return hasher.digest()


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
    """Return digests of a checkpoint's files by kind: weights, config, tokenizer and so on;
    ConfigError if a file cannot be read or is missing.

    A file counts with its name, size and bytes. Readme, licence and other files that no engine
    reads do not count. Of weights in several formats the one that vLLM loads counts.

    Args:
        directory: The checkpoint, or one file that holds all of it (GGUF).
        digests: Digests of single files.
        weights: Read weights as well; False is for a separate tokenizer.
        all_formats: Count weights in every format, for a loader that may prefer another one.
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
    """Find the files that an engine loaded, and words for people: a name, and its commit;
    ConfigError if the name cannot be tied to files on this machine.

    Args:
        name: Directory, file, or name at the Hugging Face Hub.
        revision: Of a name; None is the default branch as the local cache has it.
        cache: Download directory of the engine; None is the hub's usual cache.
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
