"""Running a deployment of real processes from a file, as `prfaas up` does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from prfaas.cli.deploy.topology import Topology
from prfaas.cli.deploy.up_command import check_deployment, make_ready
from prfaas.cli.host.processes import ProcessPart
from prfaas.cli.supervision.supervisor import Supervisor
from prfaas.config.load import load_deployment

ROOT = Path(__file__).parents[1]
LAPTOP, TIMING = ROOT / "examples" / "laptop.toml", ROOT / "examples" / "timing.toml"


def placed(example: Path, local: Path, settings: str = "") -> tuple[Path, Path]:
    """An example whose files all lie in one folder, and whose gateway takes a free port.

    Args:
        example: The file.
        local: The folder.
        settings: What takes precedence, as TOML.

    Returns:
        The new file, and the one with the settings.
    """
    known = load_deployment(example)
    file, overlay = local / example.name, local / "settings.toml"
    file.write_text(
        example.read_text()
        .replace(known.model.path, f"{local}/model")
        .replace(str(known.state), f"{local}/state")
        .replace(known.gateway.listen, "127.0.0.1:0")
        .replace('"examples/', f'"{ROOT}/examples/')
    )
    overlay.write_text(settings)
    return file, overlay


async def laid_out(file: Path, overlay: Path | None = None) -> Topology:
    """A deployment that can be started: everything is there, and every part has an address."""
    deployment = load_deployment(file, overlay)
    check_deployment(deployment)
    deployment.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    return await make_ready(deployment, file, overlay)


@asynccontextmanager
async def started(stages: list[list[ProcessPart]]) -> AsyncIterator[Supervisor]:
    """Start these parts, and stop them."""
    supervisor = Supervisor(stages)
    try:
        await supervisor.start()
        yield supervisor
    finally:
        await supervisor.stop()


def put_between(stages: list[list[ProcessPart]], source: str, peer: str, port: int) -> None:
    """Have a pool node reach its peer through what listens at a port of this machine."""
    part = next(part for stage in stages for part in stage if part.name == source)
    args = part.command.args
    args[args.index("--peer") + 1] = f"{peer}=127.0.0.1:{port}"
