"""A deployment of pools alone, and waiting for what it does."""

import time
from collections.abc import Callable

PATIENCE_S = 30.0


DEPLOYMENT = """
state = "state"
[model]
name = "tiny"
path = "./model"
[gateway]
listen = "127.0.0.1:0"
[routing]
offload_threshold = 1000
[security]
identities = "identities"
generate = true
[clusters.pd]
role = "pd"
[clusters.pd.pools.pd-pool]
memory = "1MiB"
[clusters.pd.engines.pd-engine]
pool = "pd-pool"
"""


def until(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
