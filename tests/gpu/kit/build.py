"""The archive for a bare machine with a GPU: `make gpu-kit`.

    python -m tests.gpu.kit.build [--out dist/gpu-kit.tar.xz]

It holds what such a machine lacks, unpacked, so that nothing is installed there: the project, the
distributions of `wheels.txt`, the Python files of vLLM, the bridge, and the tests that it runs.
All packages are fetched by pip, by name and version.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT, HERE = Path(__file__).parents[3], Path(__file__).parent
VLLM = "vllm==0.32.0"
BYTES_MAX = 60 << 20
PYTHON = "3.12"
PLATFORMS = tuple(f"manylinux_2_{number}_x86_64" for number in (39, 35, 34, 31, 28, 27, 26, 24, 17))
_LEFT_OUT = (
    ".so",
    ".hpp",
    ".h",
    ".cuh",
    ".cu",
    ".inl",
    ".jpg",
    "vllm-rs",
    "swagger-ui-bundle.js",
    "swagger-ui.css",
)
"""Endings of the files of vLLM that are not carried: kernels, and what builds them."""
_LEFT_OUT_FOLDERS = ("vllm/vllm_flash_attn/", "vllm/benchmarks/", "vllm/third_party/tml_fa4/")
SOURCES = ("tests", "examples", "LICENSE", "pyproject.toml", "docs/results/index.md")
"""Files and folders beside `site` in the archive, as in the project."""
BRIDGE = {
    "METADATA": "Metadata-Version: 2.1\nName: kit-bridge\nVersion: 1\n",
    "entry_points.txt": "[vllm.platform_plugins]\nkit = kit_bridge:platform\n"
    "[vllm.general_plugins]\nkit = kit_bridge:kernel_blocks\n",
    "RECORD": "",
}


def names_of(file: Path) -> list[str]:
    """Return the lines of a list, without remarks."""
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return [line for line in lines if line]


def pinned(names: list[str], lock: Path = ROOT / "requirements" / "lock.txt") -> list[str]:
    """Return requirements with the versions of the lock.

    Raises:
        LookupError: The lock has no such name.
    """
    versions = {}
    for line in lock.read_text().splitlines():
        name, equals, rest = line.partition("==")
        if equals and not line.startswith(" "):
            versions[name.lower().replace("_", "-")] = rest.split()[0]
    missing = [name for name in names if name not in versions]
    if missing:
        raise LookupError(
            f"requirements/lock.txt has no {', '.join(missing)}; take the name out of "
            "tests/gpu/kit/wheels.txt, or lock a version"
        )
    return [f"{name}=={versions[name]}" for name in names]


def download(requirements: list[str], into: Path) -> list[Path]:
    """Fetch wheels for the machine's Python and platform, none of what they ask for."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--dest", str(into)]
    command += ["--implementation", "cp", "--abi", "cp312", "--abi", "abi3", "--abi", "none"]
    for platform in (*PLATFORMS, "manylinux2014_x86_64", "manylinux1_x86_64"):
        command += ["--platform", platform]
    subprocess.run([*command, *requirements], check=True)
    return sorted(into.glob("*.whl"))


def project_wheel(into: Path) -> Path:
    """Build the project's wheel."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "--no-deps", "--wheel-dir", str(into), str(ROOT)], check=True)
    [wheel] = into.glob("prfaas-*.whl")
    return wheel


def files_of(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a wheel as they lie when it is installed; of vLLM its Python tree."""
    is_vllm = wheel.name.startswith("vllm-")
    with zipfile.ZipFile(wheel) as archive:
        for item in archive.infolist():
            name = item.filename
            if item.is_dir() or (is_vllm and not is_carried(name)):
                continue
            top, _, rest = name.partition("/")
            if top.endswith(".data"):
                scheme, _, name = rest.partition("/")
                if scheme not in ("purelib", "platlib"):
                    continue
            yield name, archive.read(item)


def is_carried(name: str) -> bool:
    """Return True for a file of vLLM's wheel that the kit has."""
    return not name.endswith(_LEFT_OUT) and not name.startswith(_LEFT_OUT_FOLDERS)


def source_files() -> Iterator[tuple[str, Path]]:
    """Yield the project's files that the kit has beside its wheel."""
    for source in SOURCES:
        place = ROOT / source
        files = [place] if place.is_file() else sorted(place.rglob("*"))
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                yield str(file.relative_to(ROOT)), file


def build(out: Path) -> dict[str, int]:
    """Write the archive; bytes by what they are, before compression."""
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as folder:
        wheels = download([*pinned(names_of(HERE / "wheels.txt")), VLLM], Path(folder))
        wheels.append(project_wheel(Path(folder)))
        out.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(out, "w:xz", preset=1) as archive:
            for wheel in wheels:
                for name, data in files_of(wheel):
                    _add(archive, f"gpu-kit/site/{name}", data, sizes, wheel.name.split("-")[0])
            for name, text in BRIDGE.items():
                path = f"gpu-kit/site/kit_bridge-1.dist-info/{name}"
                _add(archive, path, text.encode(), sizes, "bridge")
            for file in sorted((HERE / "bridge").iterdir()):
                if file.is_file():
                    path = f"gpu-kit/site/kit_bridge/{file.name}"
                    _add(archive, path, file.read_bytes(), sizes, "bridge")
            for name, file in source_files():
                _add(archive, f"gpu-kit/{name}", file.read_bytes(), sizes, "tests")
            start = (HERE / "start.py").read_bytes()
            _add(archive, "gpu-kit/start.py", start, sizes, "tests")
            _add(archive, "gpu-kit/COMMIT", _commit().encode(), sizes, "tests")
    return sizes


def _add(
    archive: tarfile.TarFile, name: str, data: bytes, sizes: dict[str, int], owner: str
) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o755 if name.endswith(".so") else 0o644
    archive.addfile(info, io.BytesIO(data))
    sizes[owner] = sizes.get(owner, 0) + len(data)


def _commit() -> str:
    git = shutil.which("git")
    command = [git or "git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout


def main() -> int:
    """Build, and print what is in it."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.kit.build", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "gpu-kit.tar.xz")
    words = parser.parse_args()
    began = time.monotonic()
    sizes = build(words.out)
    for owner, size in sorted(sizes.items(), key=lambda each: -each[1])[:12]:
        print(f"{size / 2**20:8.1f} MiB  {owner}")
    packed = words.out.stat().st_size
    print(
        f"{packed / 2**20:8.1f} MiB  {words.out.name}, packed: {len(sizes)} distributions and "
        f"folders, {sum(sizes.values()) / 2**20:.0f} MiB unpacked, "
        f"{time.monotonic() - began:.0f} s"
    )
    if packed > BYTES_MAX:
        print(f"the archive is larger than {BYTES_MAX >> 20} MiB; take names out of wheels.txt")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
