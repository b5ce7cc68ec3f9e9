"""The parts of the kit, in the order of their value, and what each may take."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from tests.gpu.kit.results import Results


class Part(NamedTuple):
    """A part of the kit.

    Attributes:
        name: Names its module `<name>_part.py`, whose `run(results)` it calls.
        letter: As in the page.
        limit_s: Longest run on a GPU, seconds.
        limit_cpu_s: Longest run on a CPU, where it is small but slow.
        title: For the page.
    """

    name: str
    letter: str
    limit_s: int
    limit_cpu_s: int
    title: str


PARTS = (
    Part("engines", "a", 210, 900, "Remote answers against cached answers"),
    Part("copies", "b", 40, 240, "Copies between device and pool memory"),
    Part("layers", "c", 70, 240, "Prefill time of layers beside the roofline"),
    Part("ttft", "d", 140, 900, "Time to first token over emulated links"),
    Part("codec", "e", 25, 240, "Exponent coding on the device"),
)
"""On a GPU 485 s in all."""
BY_NAME = {part.name: part for part in PARTS} | {part.letter: part for part in PARTS}


def chosen(words: str) -> tuple[Part, ...]:
    """Return the parts that a list names, in the order of their value.

    Args:
        words: Names or letters, with commas; "all" is every part.

    Raises:
        ValueError: A part is not known.
    """
    if words == "all":
        return PARTS
    names = [word.strip() for word in words.split(",")]
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise ValueError(
            f"parts {', '.join(unknown)} are not known; there are "
            f"{', '.join(f'{part.letter} ({part.name})' for part in PARTS)}"
        )
    return tuple(part for part in PARTS if part in {BY_NAME[name] for name in names})


def run_part(part: Part, device: str, out: Path, damage: str = "") -> Results:
    """Run a part in this process.

    Args:
        part: The part.
        device: "cuda" or "cpu".
        out: Folder of its results.
        damage: What to break on purpose.
    """
    results = Results(out, part.name, device, damage)
    results.save()
    run: Callable[[Results], Any] = import_module(f"tests.gpu.kit.{part.name}_part").run
    try:
        asyncio.run(run(results)) if inspect.iscoroutinefunction(run) else run(results)
    except Exception as problem:
        results.faults.append(f"{type(problem).__name__}: {problem}"[:2000])
        results.add("traceback", text=traceback.format_exc()[-4000:])
        results.save("failed")
    else:
        results.save("faults" if results.faults else "done")
    return results
