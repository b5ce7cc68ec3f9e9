"""The arms: deployments that differ from the first one in one protection."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from prfaas.cli.deploy.topology import Topology, parts
from prfaas.cli.host.processes import ProcessPart
from prfaas.gateway.tenancy.tenants import key_hash, new_key
from tests.deployments import ROOT, laid_out

KEY, OPERATOR = new_key(), new_key()
ONE_IN = 10
MODEL = "timing-governance"
TIME, BYTES = 0.002, 0.02
"""Of the plan's engines: what is left is the time of gateway, pool nodes and link."""
THRESHOLD = 1024


@dataclass(frozen=True)
class Arm:
    """A deployment.

    Attributes:
        name: As the table shows it.
        link: `link_encryption`.
        options: Others that are on: disk, audit, regions, users, sampling.
        has_tenants: False for requests without keys, and so without salts of tenants.
    """

    name: str
    link: str = "network"
    options: frozenset[str] = field(default_factory=frozenset)
    has_tenants: bool = True

    def settings(self, local: Path) -> str:
        """The deployment file."""
        regions = 'region = "eu"\n' if "regions" in self.options else ""
        sealed = "true" if "disk" in self.options else "false"
        text = f"""state = "{local}/state"
[model]
name = "{MODEL}"
path = "{local}/model"
generate = true
[gateway]
listen = "127.0.0.1:0"
[routing]
offload_threshold = {THRESHOLD}
policy = "paper"
transfer_timeout = "10s"
[security]
identities = "{local}/identities"
generate = true
"""
        if self.has_tenants:
            text += f'[tenants.red]\nkeys = ["{key_hash(KEY)}"]\n'
            text += 'regions = ["eu"]\n' if regions else ""
            text += "isolate_users = true\n" if "users" in self.options else ""
            text += f'[operators.all]\nkeys = ["{key_hash(OPERATOR)}"]\n'
        if "audit" in self.options:
            text += f'[audit]\nfolder = "{local}/audit"\n'
        for cluster, role in (("prfaas", "prfaas"), ("pd", "pd")):
            pool = f"clusters.{cluster}.pools.{cluster}-pool"
            text += f"""[clusters.{cluster}]
role = "{role}"
{regions}
[clusters.{cluster}.timing]
plan = "{ROOT}/examples/plan/paper-case-study.toml"
time_scale = {TIME}
bytes_scale = {BYTES}
block_tokens = 256
one_process = true
[{pool}]
memory = "64MiB"
disk = "{local}/disk-{cluster}"
disk_limit = "1GiB"
disk_sealed = {sealed}
link_encryption = "{self.link}"
"""
            for number in range(2):
                text += (
                    f'[clusters.{cluster}.engines.{cluster}-{number}]\npool = "{cluster}-pool"\n'
                )
                text += 'host_memory = "96MiB"\n'
        return text


ALL = frozenset({"disk", "audit", "regions", "users", "sampling"})
BASE = Arm("none")
ARMS = (
    Arm("audit log", options=frozenset({"audit"})),
    Arm("all, links sealed", "sealed", ALL),
    Arm("at rest: disk sealed", options=frozenset({"disk"})),
    Arm("link: sealed records", "sealed"),
    Arm("link: TLS (the default)", "tls"),
    Arm(f"sampling, one in {ONE_IN}", options=frozenset({"sampling"})),
    Arm("salts of end users", options=frozenset({"users"})),
    Arm("residency: regions", options=frozenset({"regions"})),
    Arm("no tenants: no keys, no salts", has_tenants=False),
)


def _file(arm: Arm, local: Path) -> Path:
    local.mkdir()
    file = local / "deployment.toml"
    file.write_text(arm.settings(local))
    return file


async def laid(arm: Arm, local: Path) -> tuple[Topology, list[ProcessPart]]:
    """A deployment of an arm, and its processes, pool nodes first."""
    topology = await laid_out(await asyncio.to_thread(_file, arm, local))
    made = [part for stage in parts(topology) for part in stage]
    if "sampling" in arm.options:
        [gateway] = [part for part in made if part.kind == "gateway"]
        at = gateway.command.args.index("prfaas")
        gateway.command.args[at : at + 1] = ["benchmarks.governance.sampling_gateway", str(ONE_IN)]
        gateway.command.env["PYTHONPATH"] = str(ROOT)
    return topology, made
