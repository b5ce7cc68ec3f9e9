"""Start and stop, and what an operator is told when a start fails."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import aiohttp
import pytest

from prfaas.cli.parts.gateway_annexes import serve
from prfaas.config.addresses import Endpoints
from prfaas.config.deployment import Deployment
from prfaas.errors import ConfigError

from .conftest import deployment_for

NOWHERE = Endpoints(
    engines=dict.fromkeys(("prefill", "decode", "spare"), "http://127.0.0.1:9"),
    pools=dict.fromkeys(("prfaas-pool", "pd-pool"), ("127.0.0.1", 9)),
)


async def test_serves_until_stopped(checkpoint: Path, identities: Path, tmp_path: Path) -> None:
    stop = asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    deployment = deployment_for(checkpoint, identities, tmp_path)
    task = asyncio.create_task(serve(deployment, NOWHERE, stop, url.set_result))
    base = await url
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{base}/health") as response:
            assert response.status == 503
        stop.set()
        await task
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(f"{base}/health")


async def fails(deployment: Deployment, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        await serve(deployment, NOWHERE, asyncio.Event())
    assert "\n" not in str(caught.value)


async def test_a_port_in_use(checkpoint: Path, identities: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gateway = {"listen": f"127.0.0.1:{taken.getsockname()[1]}"}
        deployment = deployment_for(checkpoint, identities, tmp_path, gateway=gateway)
        await fails(deployment, "address already in use")


async def test_no_checkpoint(identities: Path, tmp_path: Path) -> None:
    deployment = deployment_for(tmp_path / "nothing", identities, tmp_path)
    await fails(deployment, "no tokenizer for model.path")


async def test_no_identity(checkpoint: Path, tmp_path: Path) -> None:
    deployment = deployment_for(checkpoint, tmp_path / "nothing", tmp_path)
    await fails(deployment, "identity")
