"""Arguments of vLLM engines that are unknown to vLLM, set by prfaas itself, or missing."""

from __future__ import annotations

from collections.abc import Iterator

from prfaas.cli.preflight.vllm_flags import (
    Given,
    given,
    installed_version,
    is_listed_version,
    listed_version,
    similar,
)
from prfaas.config.clusters import ClusterRole, EngineTable
from prfaas.config.deployment import Deployment
from prfaas.engines.vllm_compat import check_version
from prfaas.errors import ConfigError

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
    prfaas does not support.

    Raises:
        ConfigError: One has such an argument, or vLLM has such a version.
    """
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
