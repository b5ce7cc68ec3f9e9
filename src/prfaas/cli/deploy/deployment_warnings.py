"""Warnings about valid settings without effect or with an unexpected effect."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from prfaas.config.clusters import ClusterTable
from prfaas.config.deployment import Deployment
from prfaas.config.engines.cores import within
from prfaas.core.routing.policies import PolicyName
from prfaas.core.transfer.link_encryption import LinkEncryption


def doubts(deployment: Deployment) -> Iterator[str]:
    """A line for every setting that an operator may not have meant."""
    routing, clusters = deployment.routing, deployment.clusters
    if routing.effective_policy not in (PolicyName.LOCAL, PolicyName.REMOTE):
        yield from _threshold(routing.offload_threshold, list(clusters.values()))
    blocks = {
        name: (table.timing.block_tokens, table.timing.bytes_scale)
        for name, table in clusters.items()
        if table.timing is not None
    }
    if len(set(blocks.values())) > 1:
        shown = ", ".join(
            f"{name}: {tokens} and {scale}" for name, (tokens, scale) in blocks.items()
        )
        yield (
            f"block_tokens and bytes_scale of the timing tables differ ({shown}): nothing is "
            "offloaded between clusters whose blocks differ (layout_mismatch)"
        )

    if routing.effective_policy is PolicyName.OBSERVED:
        yield from _shared_cores(deployment)
    yield from _unencrypted(clusters)


def _shared_cores(deployment: Deployment) -> Iterator[str]:
    """PrfaaS engines to which the policy offloads nothing."""
    shared = within(deployment)
    for name, homes in shared.items():
        yield (
            f"engine {name} computes on the cores of {', '.join(sorted(homes))}, where offloading "
            "only adds work: the policy observed prefills such prompts locally (shared_cores); "
            'give it `cpus` of its own, or set policy = "paper" to offload all the same'
        )


def _unencrypted(clusters: dict[str, ClusterTable]) -> Iterator[str]:
    """Pool nodes whose blocks may cross the network in the clear."""
    names = [
        name
        for table in clusters.values()
        for name, pool in table.pools.items()
        if pool.link_encryption is LinkEncryption.NETWORK
    ]
    if names:
        yield (
            f'NOT ENCRYPTED: {", ".join(names)} with link_encryption = "network" send KV blocks, '
            "which reveal prompts, readable to anyone on the path, to every peer that has it too; "
            'keep it only where the network itself encrypts (MACsec, WireGuard), else set "sealed"'
        )


def _threshold(tokens: int, clusters: list[ClusterTable]) -> Iterator[str]:
    longest = [each for table in clusters for each in _numbers(table, "max-model-len")]
    block = [each for table in clusters for each in _numbers(table, "block-size")]
    if longest and tokens >= max(longest):
        yield (
            f"routing.offload_threshold {tokens} is not below the longest sequence of any engine, "
            f'{max(longest)} tokens: nothing is offloaded; lower it, or set policy = "local"'
        )
    if block and tokens < min(block):
        yield (
            f"routing.offload_threshold {tokens} is below one KV block, {min(block)} tokens: a "
            "prompt without a whole new block has nothing to ship and is always prefilled locally"
        )


def _numbers(table: ClusterTable, option: str) -> Iterator[int]:
    """Settings of a cluster's engines: its timing table, or their `args`."""
    if table.timing is not None:
        timing = table.timing
        yield timing.max_model_len if option == "max-model-len" else timing.block_tokens
        return
    for engine in table.engines.values():
        words = [word for arg in engine.args for word in arg.split("=", 1)]
        for name, value in pairwise(words):
            if name == f"--{option}" and value.isdecimal():
                yield int(value)
