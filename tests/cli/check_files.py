"""Deployment files that `prfaas check` passes."""

from .conftest import EXAMPLES

CASE_STUDY = EXAMPLES / "plan" / "paper-case-study.toml"


TIMING = (
    (EXAMPLES / "timing.toml")
    .read_text()
    .replace("examples/plan/paper-case-study.toml", str(CASE_STUDY))
)

POOL = "pd-pool"
SITE = """
[model]
name = "m"
path = "/models/m"
[gateway]
listen = "127.0.0.1:8000"
[routing]
offload_threshold = 1000
[security]
identities = "identities"
[clusters.prfaas]
role = "prfaas"
engines.prfaas-engine.pool = "prfaas-pool"
pools.prfaas-pool.address = "10.0.0.1:7100"
[clusters.pd]
role = "pd"
engines.pd-engine.pool = "pd-pool"
pools.pd-pool = {listen = "0.0.0.0:7100", socket = "pool.sock"}
"""
"""A deployment of two sites, whose PD pool node is on this host."""
