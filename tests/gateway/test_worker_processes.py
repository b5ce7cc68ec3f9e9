"""Worker processes: their certificate, their end under load, and those that hang or never begin."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from prfaas.cli.parts import gateway_annexes
from prfaas.cli.parts.gateway_annexes import make_gateway, serve
from prfaas.config.addresses import Endpoints
from prfaas.errors import ConfigError
from prfaas.gateway.app import Gateway
from prfaas.workers.front import SILENT_S, Workers

from .conftest import World, children, deployment_for, running, until
from .http.certificates import NAME, certificate_in, trusting
from .scripted_engine import ScriptedEngine, hang, send

BODY = {"prompt": "hi", "stream": True}
NOWHERE = Endpoints(
    engines=dict.fromkeys(("prefill", "decode", "spare"), "http://127.0.0.1:9"),
    pools=dict.fromkeys(("prfaas-pool", "pd-pool"), ("127.0.0.1", 9)),
)


def front(world: World) -> Workers:
    """The workers of a gateway."""
    found = world.gateway.front
    assert isinstance(found, Workers)
    return found


async def shown(url: str, trusted: Path) -> bool:
    """Return True if a new connection shows a certificate that this authority has signed."""
    async with aiohttp.ClientSession() as http:
        try:
            async with http.get(f"{url}/health", ssl=trusting(trusted)) as answer:
                return answer.status == 200
        except aiohttp.ClientConnectorCertificateError:
            return False


def overwrite(path: Path, source: Path | None = None) -> None:
    """Change a file, but neither its length nor its time."""
    before = path.stat()
    path.write_bytes((source or path).read_bytes().ljust(4096, b"\n"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


async def test_workers_show_a_certificate_and_take_up_a_new_one(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    old, new = certificate_in(tmp_path / "old"), certificate_in(tmp_path / "new")
    for path in old.values():
        overwrite(Path(path))
    gateway = {"workers": 2, "tls": old}
    async with running(checkpoint, identities, tmp_path / "state", gateway=gateway) as world:
        port = world.url.rpartition(":")[2]
        url, trusted = f"https://{NAME}:{port}", trusting(tmp_path / "old")
        async with world.http.post(f"{url}/v1/completions", json=BODY, ssl=trusted) as answer:
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        with pytest.raises(aiohttp.ClientError):
            await world.http.get(f"http://{NAME}:{port}/health")
        # A change that no look at the files shows: only a signal, which goes to the gateway.
        for name, path in old.items():
            overwrite(Path(path), Path(new[name]))
        world.gateway.renew_identity()
        num_new = 0
        while num_new < 20:
            num_new = num_new + 1 if await shown(url, tmp_path / "new") else 0


async def test_streams_end_well_when_a_gateway_stops(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    """As without workers: what runs is served, what comes is refused, and then nobody listens."""
    engine, release, stop = ScriptedEngine("decode"), asyncio.Event(), asyncio.Event()
    begun = []

    async def slow(engine: ScriptedEngine, request: Any, body: Any) -> Any:
        if body.get("max_tokens") == 1:
            return await engine.answer(request, body)
        response = await engine.begin_stream(request)
        first, *rest = engine.chunks(body, chat=False)
        await send(response, first)
        begun.append(first)
        await release.wait()
        for chunk in rest:
            await send(response, chunk)
        await response.write(b"data: [DONE]\n\n")
        return response

    engine.script = slow
    await engine.start()
    deployment = deployment_for(checkpoint, identities, tmp_path, gateway={"workers": 2})
    endpoints = Endpoints({**NOWHERE.engines, "decode": engine.url}, NOWHERE.pools)
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(deployment, endpoints, stop, listening.set_result))
    url = f"{await listening}/v1/completions"
    answered: Counter[int] = Counter()

    async def load(http: aiohttp.ClientSession) -> None:
        while not serving.done():
            try:
                async with http.post(url, json={"prompt": "hi", "max_tokens": 1}) as answer:
                    await answer.read()
                    answered[answer.status] += 1
            except aiohttp.ClientConnectionError:  # Kept, and closed as it was to be used again.
                return

    async with aiohttp.ClientSession() as http:
        streams = [asyncio.create_task(http.post(url, json=BODY)) for _ in range(12)]
        loads = [asyncio.create_task(load(http)) for _ in range(4)]
        await until(lambda: len(begun) == 12 and answered[200] > 8)
        stop.set()
        await until(lambda: answered[503] > 8)
        release.set()
        for stream in streams:
            async with await stream as answer:
                assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        await serving
        await asyncio.gather(*loads)
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.post(url, json=BODY)
    assert answered.keys() == {200, 503}
    await engine.stop()


async def test_a_worker_that_hangs_is_replaced(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    """Others take what comes meanwhile; what it had is free again."""
    before = children()
    gateway = {"workers": 2}
    async with running(checkpoint, identities, tmp_path / "state", gateway=gateway) as world:
        url, requests = f"{world.url}/v1/completions", world.gateway.driver.dispatcher.requests
        await until(lambda: bool(front(world)._facts.max_model_len))
        world.decode.script = hang
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            asked = [asyncio.create_task(http.post(url, json={"prompt": "hi"})) for _ in range(16)]
            await until(lambda: len(world.decode.calls) == 16 == len(requests))
            world.decode.script = None
            worker = max(front(world)._workers, key=lambda each: len(each.requests))
            num_held = len(worker.requests)
            worker.signal(signal.SIGSTOP)
            while not worker.gone.is_set():
                worker.heard_at = asyncio.get_running_loop().time() - SILENT_S - 1.0
                async with world.http.post(url, json=BODY) as answer:
                    assert (await answer.read()).endswith(b"data: [DONE]\n\n")
            await until(lambda: len(requests) <= 16 - num_held)
            await until(lambda: sum(each.done() for each in asked) >= num_held > 0)
            for each in asked:
                if each.done():
                    assert isinstance(each.exception(), aiohttp.ClientError)
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        await until(lambda: len(children() - before) == 2 and not requests)
    assert children() <= before


async def test_a_worker_without_a_channel_is_replaced(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    """It is of no use, and cannot end by itself."""
    before = children()
    gateway = {"workers": 2}
    async with running(checkpoint, identities, tmp_path / "state", gateway=gateway) as world:
        [worker, _] = front(world)._workers
        assert worker.process is not None
        worker.signal(signal.SIGSTOP)
        worker.channel.close()
        await until(lambda: worker.process is not None and worker.process.returncode is not None)
        await until(lambda: len(front(world)._ready) == 2)
    assert children() <= before


async def test_workers_that_never_listen_are_an_error(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    before = children()
    deployment = deployment_for(checkpoint, identities, tmp_path, gateway={"workers": 2})
    gateway = make_gateway(deployment, NOWHERE)
    assert isinstance(gateway.front, Workers)
    gateway.front.ready_s = 0.01
    with pytest.raises(ConfigError, match=r"a worker does not listen after 0\.01 s; see log"):
        await gateway.start()
    await gateway.close()
    assert children() <= before


async def test_workers_that_end_at_once_are_an_error(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    before, tls = children(), certificate_in(tmp_path / "tls")
    gateway = {"workers": 2, "tls": tls}
    made = make_gateway(deployment_for(checkpoint, identities, tmp_path, gateway=gateway), NOWHERE)
    await asyncio.to_thread(Path(tls["key"]).unlink)
    with pytest.raises(ConfigError, match="a worker ended with status 1 before it was ready"):
        await made.start()
    await made.close()
    assert children() <= before


@pytest.mark.parametrize("fails", [True, False])
async def test_workers_read_while_a_gateway_is_put_together(
    checkpoint: Path,
    identities: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    fails: bool,
) -> None:
    before, seen, stop = children(), [], asyncio.Event()

    def made(*args: Any) -> Gateway:
        seen.append(children() - before)
        if fails:
            raise ConfigError("no tokenizer")
        return make_gateway(*args)

    monkeypatch.setattr(gateway_annexes, "make_gateway", made)
    deployment = deployment_for(checkpoint, identities, tmp_path, gateway={"workers": 2})
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(deployment, NOWHERE, stop, listening.set_result))
    both: list[asyncio.Future[Any]] = [serving, listening]
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    assert len(seen[0]) == 2
    assert children() - before == (set() if fails else seen[0])
    stop.set()
    if fails:
        with pytest.raises(ConfigError):
            await serving
    else:
        await serving
    assert children() <= before
