"""The shared tier of a pool node, of the kind that its settings name."""

from __future__ import annotations

from collections.abc import Set

from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.shared.bucket import S3Bucket
from prfaas.pool.shared.s3_tier import S3Tier
from prfaas.pool.shared.settings import S3Settings
from prfaas.pool.shared.site_keys import load_keys
from prfaas.pool.store.block_store import BlockStore
from prfaas.pool.store.tier_ports import SharedTier


def open_shared(
    settings: S3Settings, pool: str, hosts: Set[str], metrics: PoolMetrics, store: BlockStore
) -> SharedTier:
    """Open a shared tier and put it below a store.

    Args:
        settings: Of the tier.
        pool: Name of this pool node.
        hosts: Other pool nodes of the site.
        metrics: Of the pool node.
        store: Reports the blocks of the tier from now on.

    Raises:
        ConfigError: A package is missing, or a setting or the file of keys is wrong.
    """
    tier = S3Tier(
        settings,
        S3Bucket(settings),
        load_keys(settings.keys),
        pool,
        hosts,
        metrics,
        lambda names: store.found_below(tier, names),
        store.gone_below,
    )
    store.share_with(tier)
    return tier
