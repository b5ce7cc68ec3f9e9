"""A PrfaaS site and a PD site of timing engines in network namespaces, and a WAN between them."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prfaas.engines.checkpoint import make_checkpoint
from prfaas.wire.identity import make_authority, make_identity
from tests.lab.wan import Side, Wan

PLAN = Path(__file__).parents[1] / "examples" / "plan" / "paper-case-study.toml"
POOL_PORT, ENGINE_PORT, GATEWAY = 7100, 8100, "127.0.0.1:8000"
AWAY: Side = "a"
HOME: Side = "b"
CLUSTERS = {AWAY: "prfaas", HOME: "pd"}


def prepare(place: Path) -> None:
    """Make the tokenizer and the identities of both sites in a folder."""
    make_checkpoint(place / "tokenizer", weights=False)
    make_authority(place)
    for name in ("gateway", *(f"{cluster}-pool" for cluster in CLUSTERS.values())):
        make_identity(place, name)


@dataclass(frozen=True)
class TwoSites:
    """Both sites, and how their parts are started.

    Attributes:
        wan: The link.
        place: Folder of tokenizer, keys, sockets and logs.
        model: Name that is served.
    """

    wan: Wan
    place: Path
    model: str

    @property
    def tokenizer(self) -> Path:
        """Path of the model's tokenizer."""
        return self.place / "tokenizer"

    def engine_url(self, side: Side, index: int) -> str:
        """Base URL of an engine."""
        return f"http://{self.wan.address(side)}:{ENGINE_PORT + index}"

    async def start_pool(self, side: Side, memory: str, admin: str, *more: str) -> None:
        """Start the pool node of a site.

        Args:
            side: Which.
            memory: Its limit.
            admin: Where it tells its metrics.
            more: Further arguments.
        """
        name = f"{CLUSTERS[side]}-pool"
        arguments = ["pool", "--name", name, "--memory", memory, "--admin", admin, *more]
        arguments += ["--listen", f"{self.wan.address(side)}:{POOL_PORT}"]
        arguments += ["--socket", str(self._socket(side))]
        arguments += ["--identities", str(self.place), "--gateway", "gateway"]
        if side == AWAY:
            arguments += ["--peer", f"pd-pool={self.wan.address(HOME)}:{POOL_PORT}"]
        else:
            arguments += ["--source", "prfaas-pool"]
        await self._start(side, name, arguments)

    async def start_engines(self, side: Side, names: Sequence[str], *more: str) -> None:
        """Start the engines of a site, all in one process; `more` are further arguments."""
        arguments = ["engine", "timing", "--plan", str(PLAN), "--pool", str(self._socket(side))]
        arguments += ["--cluster", "prfaas"] if side == AWAY else []
        arguments += ["--model", self.model, "--model-path", str(self.tokenizer), *more]
        for index, name in enumerate(names):
            arguments += ["--engine", f"{name}={self.wan.address(side)}:{ENGINE_PORT + index}"]
        await self._start(side, f"{CLUSTERS[side]}-engines", arguments)

    async def start_gateway(
        self, routing: Sequence[str], engines: Mapping[Side, Mapping[str, str]]
    ) -> None:
        """Start the gateway, at the PD site.

        Args:
            routing: Lines of `[routing]`.
            engines: By side, their roles by name; "" for none.
        """
        lines = [f'state = "{self.place}/state"', "[model]", f'name = "{self.model}"']
        lines += [f'path = "{self.tokenizer}"', "[gateway]", f'listen = "{GATEWAY}"']
        lines += ["[routing]", *routing, "[security]", f'identities = "{self.place}"']
        for side, roles in engines.items():
            lines += self._cluster(side, roles)
        file = self.place / "gateway.toml"
        file.write_text("\n".join(lines) + "\n")
        await self._start(HOME, "gateway", ["gateway", str(file)])

    async def _start(self, side: Side, name: str, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "prfaas", *arguments]
        with (self.place / f"{name}.log").open("wb") as log:
            await self.wan.run(side, command, stdout=log, stderr=log, env=dict(os.environ))

    def _socket(self, side: Side) -> Path:
        return self.place / f"{CLUSTERS[side]}.sock"

    def _cluster(self, side: Side, roles: Mapping[str, str]) -> list[str]:
        cluster = CLUSTERS[side]
        pool = f"{cluster}-pool"
        lines = [f"[clusters.{cluster}]", f'role = "{cluster}"']
        lines += [f"[clusters.{cluster}.pools.{pool}]"]
        lines += [f'address = "{self.wan.address(side)}:{POOL_PORT}"']
        for index, (name, role) in enumerate(roles.items()):
            lines += [f"[clusters.{cluster}.engines.{name}]", f'pool = "{pool}"']
            lines += [f'url = "{self.engine_url(side, index)}"']
            lines += [f'role = "{role}"'] if role else []
        return lines
