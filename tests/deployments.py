"""Running a deployment of real processes from a file, as `prfaas up` does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from prfaas.cli.deploy import check_deployment, make_ready
from prfaas.cli.processes import Part, Supervisor
from prfaas.cli.topology import Topology
from prfaas.config.load import load_deployment

ROOT = Path(__file__).parents[1]
LAPTOP, TIMING = ROOT / "examples" / "laptop.toml", ROOT / "examples" / "timing.toml"
SETTINGS = """
state = "{home}/state"
[model]
path = "{home}/model"
[gateway]
listen = "127.0.0.1:0"
[security]
identities = "{home}/state/identities"
"""


def settings_in(home: Path, more: str = "") -> Path:
    """Settings that keep all files of an example in one folder, and take a free port.

    Args:
        home: The folder.
        more: Further settings, as TOML.

    Returns:
        The file, to be given precedence over the example's.
    """
    file = home / "settings.toml"
    file.write_text(SETTINGS.format(home=home) + more)
    return file


async def laid_out(file: Path, overlay: Path | None = None) -> Topology:
    """A deployment that can be started: everything is there, and every part has an address."""
    deployment = load_deployment(file, overlay)
    check_deployment(deployment)
    deployment.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    return await make_ready(deployment, file, overlay)


@asynccontextmanager
async def started(stages: list[list[Part]]) -> AsyncIterator[Supervisor]:
    """Start these parts, and stop them."""
    supervisor = Supervisor(stages)
    try:
        await supervisor.start()
        yield supervisor
    finally:
        await supervisor.stop()


def put_between(stages: list[list[Part]], source: str, peer: str, port: int) -> None:
    """Have a pool node reach its peer through what listens at a port of this machine."""
    part = next(part for stage in stages for part in stage if part.name == source)
    args = part.command.args
    args[args.index("--peer") + 1] = f"{peer}=127.0.0.1:{port}"
