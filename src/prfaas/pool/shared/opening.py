"""The shared tier of a pool node, of the kind that its settings name."""

from __future__ import annotations

from collections.abc import Set

from prfaas.pool.keys.site_keys import load_keys
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.shared.bucket import S3Bucket
from prfaas.pool.shared.mooncake.client import check_package
from prfaas.pool.shared.mooncake.mooncake_tier import MooncakeTier
from prfaas.pool.shared.s3_tier import S3Tier
from prfaas.pool.shared.settings import S3Settings, SharedSettings
from prfaas.pool.store.block_store import BlockStore
from prfaas.pool.store.tier_ports import SharedTier


def open_shared(
    settings: SharedSettings, pool: str, hosts: Set[str], metrics: PoolMetrics, store: BlockStore
) -> SharedTier:
    """Open a shared tier and put it below a store.

    Args:
        pool: Name of this pool node.
        hosts: Other pool nodes of the site.
        metrics: Of the pool node.
        store: Reports the blocks of the tier from now on.

    Raises:
        ConfigError: A package is missing, or a setting or the file of keys is wrong.
    """
    keys = load_keys(settings.keys)
    tier: SharedTier
    if isinstance(settings, S3Settings):
        bucket = S3Bucket(settings)
        tier = S3Tier(settings, bucket, keys, pool, hosts, metrics, store)
    else:
        check_package()
        tier = MooncakeTier(settings, keys, pool, hosts, metrics, store)
    store.tiers.add(tier)
    return tier
