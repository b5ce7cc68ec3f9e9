"""The page of a run: `docs/results/gpu.md`, from the files of the parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.gpu.kit.parts import PARTS
from tests.gpu.kit.results import Record, read
from tests.live.identity_by_kind import COLUMNS

COMMAND = "make gpu-kit"
NO_GPU = (
    "**No run on a GPU has been made.** No GPU was at hand so far. What follows is the kit's dry "
    "run on a CPU: its parts run to their ends in small, and its times say nothing about a GPU."
)
KERNELS = (
    "The vLLM of the kit is its Python tree without compiled kernels: attention and the gated "
    "delta net are vLLM's Triton kernels, all else is PyTorch's operations, "
    "without CUDA graphs or compilation. Bytes, descriptions, copies and the identity of answers "
    "hold for the released build too; TTFT and prefill times of engines are upper bounds of it."
)


def page(out: Path, dry_run: str = "") -> str:
    """Return the page.

    Args:
        out: Folder of the results.
        dry_run: What the dry run beside PyTorch 2.11 printed, if there was one.
    """
    machine = json.loads((out / "machine.json").read_text())
    is_gpu = machine["device"] == "cuda"
    sections = ["# Engines on a GPU", KIT, *([] if is_gpu else [NO_GPU])]
    sections += ["## Machine and versions", _provenance(machine)]
    has_bare_vllm = "vllm" in machine["versions"]
    sections += [KERNELS] if is_gpu and has_bare_vllm else []
    for part in PARTS:
        found = read(out, part.name)
        sections.append(f"## ({part.letter}) {part.title}")
        if found is None:
            sections.append("Did not run.")
            continue
        sections += [*_tables(found["records"]), _ended(found)]
    if dry_run:
        sections += ["## Dry run beside PyTorch 2.11", DRY, f"```\n{dry_run.strip()}\n```"]
    return "\n\n".join(sections) + "\n"


KIT = f"""\
`{COMMAND}` packs what a bare machine with one NVIDIA GPU lacks: this project, the distributions
that are missing there, and vLLM's Python tree. There, one command runs five parts, each with a
limit of its own, and writes this page:

    tar xf gpu-kit.tar.xz && python3 gpu-kit/start.py --out results

`--parts a,c` chooses parts, `--device cpu` runs all of them in small without a GPU. Each part
writes its figures at once, so that a run that is cut keeps what it had. Where a GPU and vLLM are
installed, `python -m pytest -m gpu` runs the same parts."""
DRY = (
    "Python 3.12, PyTorch 2.11, Triton 3.6 and the unpacked archive, no network, no GPU "
    "(`python3 gpu-kit/start.py --dry`). vLLM's CUDA path runs on a GPU that is not there: Triton "
    "compiles each kernel for sm_90 and starts none, tensors lie in host memory, and the copies of "
    "the offloading worker are real. Answers mean nothing; descriptions, paths and bytes do."
)


def _provenance(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {found}" for name, found in machine["versions"].items())
    where = (
        f"{machine['gpu']}, driver and memory {machine['driver']}"
        if machine["device"] == "cuda"
        else "no GPU"
    )
    lines = [
        f"    {machine['command']}",
        f"{where}; CPU {machine['cpu']}, memory {machine['memory']}. Python {machine['python']}; "
        f"{versions}. Commit {machine['commit']}; {machine['date']}.",
    ]
    return "\n\n".join(lines)


def _ended(found: Record) -> str:
    lines = [f"{found['ended'] or 'not ended'}, after {found['seconds']:,.0f} s."]
    lines += [f"- Fault: {words}" for words in found["faults"]]
    lines += [f"- Did not run: {words}" for words in found["skipped"]]
    return "\n".join(line[:600] for line in lines)


def _tables(records: list[Record]) -> list[str]:
    """Return a table for each kind of record, in the order of their first."""
    found = []
    for name in dict.fromkeys(record["record"] for record in records):
        some = [record for record in records if record["record"] == name]
        form = _FORMS.get(name)
        if form is not None:
            found.append(form(some))
    return found


def table(columns: Iterable[str], lines: Iterable[Iterable[object]]) -> str:
    """Return a table."""
    names = list(columns)
    rows = [f"| {' | '.join(str(each) for each in line)} |" for line in lines]
    return "\n".join([f"| {' | '.join(names)} |", "|---" * len(names) + "|", *rows])


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _answers(some: list[Record]) -> str:
    header = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    return "\n".join([*header, *(record["line"] for record in some)])


def _kernel_blocks(some: list[Record]) -> str:
    lines = "\n".join(record["line"] for record in some)
    before = f"One engine reads pages in blocks of {some[0]['tokens']} tokens, the other whole:"
    header = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    return "\n\n".join([before, "\n".join([*header, lines])])


_DIFFER = ("differ_as_pages", "differ_as_blocks")


def _unlike(some: list[Record]) -> str:
    tokens = some[0]["tokens"]
    return (
        f"An engine with kernel blocks of {tokens} tokens shares no blocks: its layout is another."
    )


def _pages(some: list[Record]) -> str:
    columns = ("tokens of a page", "kernel block", "KV heads", "bytes", "differ as pages")
    return table(
        (*columns, "differ as canonical blocks"),
        ([r[name] for name in ("tokens", "kernel", "heads", "num_bytes", *_DIFFER)] for r in some),
    )


def _copies(some: list[Record]) -> str:
    return table(
        ("host memory", "block, B", "to the host, GB/s", "to the device, GB/s"),
        (
            (
                "pinned" if r["pinned"] else "pageable",
                f"{r['block_bytes']:,}",
                _number(r["to_host_gb_s"]),
                _number(r["to_device_gb_s"]),
            )
            for r in some
        ),
    )


def _beside(some: list[Record]) -> str:
    return table(
        ("beside", "copies alone, s", "compute alone, s", "both, s", "hidden", "compute slower by"),
        (
            (
                r["phase"],
                _number(r["copy_s"]),
                _number(r["compute_s"]),
                _number(r["both_s"]),
                f"{r['hidden_ratio']:.0%}",
                f"{r['slowdown'] - 1:.1%}",
            )
            for r in some
        ),
    )


def _refused(some: list[Record]) -> str:
    return "\n".join(
        f"Where CUDA refuses to pin (error {r['code']}), copies go on from pageable memory: "
        f"{_number(r['to_host_gb_s'])} GB/s to the host, {_number(r['to_device_gb_s'])} GB/s back."
        for r in some
    )


def _worker(some: list[Record]) -> str:
    return table(
        ("vLLM's worker may pin", "pinned", "wrong blocks", "both ways, s"),
        ((r["may_pin"], r["pinned"], r["wrong_blocks"], _number(r["seconds"])) for r in some),
    )


def _layers(some: list[Record]) -> str:
    return table(
        ("layer", "cached prefix", "new tokens", "measured, ms", "roofline, ms", "ratio"),
        (
            (
                r["layer"],
                f"{r['prefix']:,}",
                f"{r['new']:,}",
                _number(1e3 * r["seconds"]),
                _number(1e3 * r["roofline_s"]),
                _number(r["ratio"]),
            )
            for r in some
        ),
    )


def _cached(some: list[Record]) -> str:
    return "After a cached prefix against computed whole, relative error: " + ", ".join(
        f"{r['layer']} {r['relative_error']:.2g}" for r in some
    )


def _ttft(some: list[Record]) -> str:
    columns = ("prompt", "link, Gbit/s", "local, s", "remote, s", "predicted, s")
    return table(
        (*columns, "remote / predicted", "KV shipped, B", "path"),
        (
            (
                f"{r['tokens']:,}",
                f"{r['link_bits_per_s'] / 1e9:g}",
                _number(r["alone_s"]),
                _number(r["remote_s"]),
                _number(r["predicted_s"]),
                _number(r["ratio"]),
                f"{r['kv_bytes']:,}",
                r["path"] if r["fallback"] is None else f"fell back: {r['fallback']}",
            )
            for r in some
        ),
    )


def _codec(some: list[Record]) -> str:
    columns = ("values", "bytes", "shrunk to", "exact", "CPU core in / out, GB/s")
    return table(
        (*columns, "GPU in / out, GB/s"),
        (
            (
                r["spread"],
                f"{r['num_bytes']:,}",
                f"{1 / r['ratio']:.1%}",
                r["exact"],
                f"{_number(r['cpu_in_gb_s'])} / {_number(r['cpu_out_gb_s'])}",
                f"{_number(r['gpu_in_gb_s'])} / {_number(r['gpu_out_gb_s'])}"
                if "gpu_in_gb_s" in r
                else "interpreted",
            )
            for r in some
        ),
    )


_FORMS: Mapping[str, Callable[[list[Record]], str]] = {
    "answers": _answers,
    "kernel blocks": _kernel_blocks,
    "kernel blocks refused": _unlike,
    "pages": _pages,
    "copies": _copies,
    "beside": _beside,
    "refused": _refused,
    "worker": _worker,
    "layer": _layers,
    "cached": _cached,
    "ttft": _ttft,
    "codec": _codec,
}
