"""A Ray cluster of several nodes on this machine, without accelerators, dashboard or telemetry.

    python -m tests.ray_nodes.program FOLDER CPUS_OF_NODE...

Prints a JSON line with its address and the ids of its nodes once it runs. Each line of standard
input is the number of a node to kill with everything on it; the end of standard input ends the
cluster.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ray._common.utils import get_default_ray_temp_dir
from ray._private.node import Node
from ray.cluster_utils import Cluster

OBJECT_STORE_BYTES = 80 << 20


def main() -> None:
    folder, *cpus = sys.argv[1:]
    # Ray writes the address of a cluster there, and only `ray start` makes the directory.
    Path(get_default_ray_temp_dir()).mkdir(parents=True, exist_ok=True)
    cluster = Cluster()
    nodes: list[Node] = []
    for number, count in enumerate(cpus):
        node = cluster.add_node(
            wait=True,
            num_cpus=int(count),
            node_ip_address="127.0.0.1",
            resources={f"host{number}": 100},
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            **({} if nodes else {"temp_dir": folder}),
        )
        nodes.append(node)
    ids = [node.node_id for node in nodes]
    print(json.dumps({"address": cluster.address, "ids": ids}), flush=True)
    for line in sys.stdin:
        node = nodes[int(line)]
        cluster.remove_node(node, allow_graceful=False)
        print(json.dumps({"killed": int(line)}), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
