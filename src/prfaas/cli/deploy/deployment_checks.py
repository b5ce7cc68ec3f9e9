"""Faults of a deployment on this machine, beyond the rules of its file."""

from __future__ import annotations

import contextlib
import datetime
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prfaas.cli.deploy.deployment_warnings import is_in_a_pod
from prfaas.cli.deploy.topology import identity_names
from prfaas.cli.host.processes import SHARED_MEMORY
from prfaas.cli.preflight.vllm_flags import vllm_engines
from prfaas.config.clusters import ClusterRole, ClusterTable
from prfaas.config.deployment import Deployment
from prfaas.core.market.choice import PlannedSite
from prfaas.deployment_secret import FILE_NAME
from prfaas.engines.shared_memory import abandoned_bytes
from prfaas.errors import ConfigError
from prfaas.extras import missing
from prfaas.market.price_file import deployment_market
from prfaas.units import format_seconds, format_size
from prfaas.wire.certificates import ends_soon
from prfaas.wire.identity import identity_in

if TYPE_CHECKING:
    from prfaas.planner.answer.plan_loader import Question

KV_TOKENS = 8192
"""Length at which the KV cache of plan and model are compared."""
PLAN_RATIO_MAX = 2.5
"""More apart than a KV cache in fp8 and one in bf16 is another model."""
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def uninstalled(deployment: Deployment) -> Iterator[str]:
    """Yield a sentence for what parts started here need and is not installed."""
    # In a pod, engines are other pods, of another image.
    starts_vllm = not is_in_a_pod() and any(vllm_engines(deployment))
    if starts_vllm and (lack := missing("a vLLM engine, which starts here,", "vllm")):
        yield (
            f"{lack}, without a GPU 'prfaas[engine-cpu]'; timing engines, which compute "
            "nothing, need neither: prfaas up timing"
        )
    if deployment.tracing is not None:
        yield from filter(None, [missing("[tracing]", "tracing")])


def check_timing(deployment: Deployment) -> None:
    """Check that timing engines started here have their plan, and memory for a block; ConfigError
    if one has not."""
    for name, cluster in deployment.clusters.items():
        if cluster.timing is not None and not all(e.url for e in cluster.engines.values()):
            _check_timing(deployment.model.name, name, cluster)


def _check_timing(model: str, name: str, cluster: ClusterTable) -> None:
    # The planner takes a second to import.
    from prfaas.engines.timing.profile import load_profile

    timing = cluster.timing
    if timing is None:
        return
    place = f"clusters.{name}.timing.plan"
    try:
        profile = load_profile(
            timing.plan,
            name if cluster.role is ClusterRole.PRFAAS else None,
            model,
            block_tokens=timing.block_tokens,
            bytes_scale=timing.bytes_scale,
            hash_scheme=timing.hash_scheme,
        )
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    block_bytes = max(group.block_bytes for group in profile.layout.groups)
    for engine_name, engine in cluster.engines.items():
        if not engine.url and engine.host_memory < block_bytes:
            raise ConfigError(
                f"clusters.{name}.engines.{engine_name}.host_memory: {engine.host_memory} bytes "
                f"hold no block, which has {block_bytes}; give it more, or make blocks smaller "
                f"with clusters.{name}.timing.bytes_scale"
            )


def check_plan(deployment: Deployment) -> None:
    """See that `routing.plan` can be a plan of this deployment.

    Raises:
        ConfigError: It cannot: its clusters, their sizes, or its bytes of KV cache are those of
            another one.
    """
    plan = deployment.routing.plan
    if plan is None:
        return
    # The gateway and the planner take a second to import.
    from prfaas.cli.parts.gateway_plan import load_profiles
    from prfaas.planner.answer.plan_loader import load_question

    try:
        profiles = load_profiles(deployment)
        question = load_question(plan)
    except ConfigError as error:
        raise ConfigError(f"routing.plan: {error}") from None
    deployment_market(deployment, profiles.sites)
    check_targets(deployment, profiles.sites)
    for found in (*_other_instances(deployment, question), *_other_model(deployment, question)):
        raise ConfigError(f"routing.plan: {plan} cannot be this deployment's: {found}")


def _other_instances(deployment: Deployment, question: Question) -> Iterator[str]:
    """Clusters that the plan or the deployment lacks, and clusters of another size.

    With engines that come and go, sizes are not compared.
    """
    if deployment.membership.has_sources:
        return
    tables = deployment.clusters.items()
    remote = {n: len(c.engines) for n, c in tables if c.role is ClusterRole.PRFAAS}
    planned = {c.name: c.num_instances for c in question.problem.prfaas}
    if len(planned) == 1:
        # A single one stands for all, under any name.
        remote, planned = {"prfaas": sum(remote.values())}, {"prfaas": sum(planned.values())}
    local = sum(len(c.engines) for c in deployment.with_role(ClusterRole.PD))
    yield from _other_count("pd", local, question.problem.pd.num_instances)
    for name, num_instances in planned.items():
        if name not in remote:
            yield f"it has a PrfaaS cluster {name!r}, and the deployment has none of that name"
        else:
            yield from _other_count(name, remote[name], num_instances)


def _other_count(cluster: str, num_engines: int, num_instances: int) -> Iterator[str]:
    if num_engines != num_instances:
        yield (
            f"cluster {cluster} has {num_engines} engines, and the plan has {num_instances} "
            "instances; set `instances` in the plan to what there is and plan again"
        )


def _other_model(deployment: Deployment, question: Question) -> Iterator[str]:
    """KV cache of another size than the model's that is served."""
    from prfaas.planner.model.kv_geometry import kv_bytes

    planned = kv_bytes(question.problem.geometry, KV_TOKENS)
    for what, found in _kv_bytes(deployment):
        if not 1 / PLAN_RATIO_MAX <= found / planned <= PLAN_RATIO_MAX:
            yield (
                f"{KV_TOKENS} tokens are {format_size(found)} of KV cache in {what}, and "
                f"{format_size(planned)} in the plan; name the model that is served under [model]"
            )


def _kv_bytes(deployment: Deployment) -> Iterator[tuple[str, int]]:
    """Bytes of KV cache at `KV_TOKENS`, by where that is written, as far as it can be read."""
    from prfaas.planner.answer.plan_loader import load_question, read_config_json
    from prfaas.planner.model.hf_config import geometry_from_config
    from prfaas.planner.model.kv_geometry import kv_bytes

    for name, cluster in deployment.clusters.items():
        if cluster.timing is not None:
            timed = load_question(cluster.timing.plan).problem.geometry
            yield f"clusters.{name}.timing.plan", kv_bytes(timed, KV_TOKENS)
    file = Path(deployment.model.path) / "config.json"
    if any(cluster.timing for cluster in deployment.clusters.values()) or not file.exists():
        return
    with contextlib.suppress(ConfigError):
        geometry = geometry_from_config(read_config_json(file), name=str(file))
        yield str(file), kv_bytes(geometry, KV_TOKENS)


def check_disks(deployment: Deployment) -> None:
    """See that every folder for blocks is given to one pool node started here; ConfigError if one
    is not."""
    owners: dict[Path, str] = {}
    for cluster in deployment.clusters.values():
        for name, pool in cluster.pools.items():
            if pool.disk is None or pool.address:
                continue
            other = owners.setdefault(pool.disk.resolve(), name)
            if other != name:
                raise ConfigError(
                    f"{other} and {name} cannot both keep blocks in {pool.disk}; "
                    "name another folder for one of them"
                )


def check_shared_memory(deployment: Deployment) -> None:
    """Check that the shared memory of vLLM engines started here fits.

    Raises:
        ConfigError: It does not fit: an engine would exit minutes later without a reason.
    """
    sizes = {
        name: engine.host_memory
        for cluster in deployment.clusters.values()
        if cluster.timing is None
        for name, engine in cluster.engines.items()
        if not engine.url
    }
    if not sizes:
        return
    found = os.statvfs(SHARED_MEMORY)
    # Memory of killed engines is removed by the next start.
    free_bytes = found.f_bavail * found.f_frsize + abandoned_bytes()
    wanted_bytes = sum(sizes.values())
    if wanted_bytes > free_bytes:
        raise ConfigError(
            f"host_memory of {', '.join(sizes)} is {format_size(wanted_bytes)} together, and "
            f"{SHARED_MEMORY}, its file system, has {format_size(free_bytes)} free: give the "
            "engines "
            "less, or the machine more (containers: --shm-size; Kubernetes: an emptyDir with "
            "medium Memory at /dev/shm)"
        )


def short_lived(deployment: Deployment, names: Sequence[str] | None = None) -> Iterator[str]:
    """A line for every identity on this machine that ends soon.

    Args:
        names: The parts; all that are started here if absent.
    """
    for name in identity_names(deployment) if names is None else names:
        identity = identity_in(deployment.security.identities, name)
        yield from ends_soon(identity, datetime.datetime.now(datetime.UTC))


def open_secrets(deployment: Deployment, names: Sequence[str] | None = None) -> Iterator[str]:
    """A line for every secret on this machine that not only its owner can read.

    Args:
        names: Parts whose keys are meant; all that are started here if absent.
    """
    directory = deployment.security.identities
    found = identity_names(deployment) if names is None else names
    keys = [identity_in(directory, name).key for name in found]
    for path in [directory / "ca.key", *keys, deployment.state / FILE_NAME]:
        try:
            status = path.stat()
        except OSError:
            continue
        mode = stat.S_IMODE(status.st_mode)
        if mode & _OTHERS and not _is_of_a_pod(status):
            yield f"{path} is a secret, and its mode {mode:o} lets others in: chmod 600 {path}"


def _is_of_a_pod(found: os.stat_result) -> bool:
    """Return True for a file of a Secret as the kubelet mounts it: root's, for the pod's group."""
    others = stat.S_IMODE(found.st_mode) & _OTHERS
    return (
        found.st_uid == 0 != os.getuid()
        and found.st_gid in os.getgroups()
        and others == stat.S_IRGRP
    )


def check_targets(deployment: Deployment, sites: Mapping[str, PlannedSite]) -> None:
    """See that targets of classes leave time for the round trip of a link; ConfigError if one is
    below the round trips of all links of the plan."""
    trips = [(site.rtt_ns, name) for name, site in sites.items() if site.rtt_ns]
    if not trips:
        return
    least_ns, nearest = min(trips)
    for name, table in deployment.classes.items():
        if table.ttft is not None and table.ttft < least_ns:
            raise ConfigError(
                f"classes.{name}.ttft: {format_seconds(table.ttft)} is below the round trip of "
                f"every link; the shortest is {format_seconds(least_ns)}, of {nearest}"
            )
