"""Tenants of a gateway: access, limits, and visibility."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp.test_utils import make_mocked_request
from click.testing import CliRunner

from prfaas.cli.main import cli
from prfaas.config.deployment import GatewayTable
from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.types import Arrival
from prfaas.core.facts import FactStream
from prfaas.core.kv.tenant_salts import tenant_tag, user_salt
from prfaas.errors import RequestError
from prfaas.gateway.api.auth import Access
from prfaas.gateway.tenancy.tenants import Tenants, fairness, key_hash
from tests.gateway.conftest import World, deployment_for, running, until
from tests.gateway.legs_tickets import ticket_of
from tests.gateway.prompts import LONG, SHORT
from tests.gateway.scripted_engine import die_after, hang, stream_then_hang
from tests.gateway.tenant_keys import HASHES, KEYS, bearer, tenants
from tests.otlp import Collector


@pytest.fixture
async def two(checkpoint: Path, identities: Path, tmp_path: Path) -> AsyncIterator[World]:
    async with running(checkpoint, identities, tmp_path / "state", tenants=tenants()) as made:
        yield made


async def ask(world: World, name: str, prompt: str = SHORT, **fields: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": 3, **fields}
    async with world.http.post(
        f"{world.url}/v1/completions", json=body, headers=bearer(name)
    ) as response:
        return response.status, response.headers.copy(), await response.json()


# Keys


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic {key}", "{key}", "Bearer {key}x"],
)
async def test_without_a_known_key_nobody_gets_in(two: World, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.format(key=KEYS["red"])}
    for method, path in (
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("POST", "/v1/nothing"),
    ):
        async with two.http.request(
            method, two.url + path, headers=headers, json={"prompt": SHORT}
        ) as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
            error = (await response.json())["error"]
            assert error["type"] == "AuthenticationError"
            assert error["code"] == 401
            assert error["param"] is None
            assert KEYS["red"] not in error["message"]
    assert not two.decode.calls
    async with two.http.get(f"{two.url}/control/requests") as response:
        assert (await response.json())["requests"] == []
    assert await two.metric("prfaas_unauthorized_total") == 4


async def test_openais_client_with_a_key_and_without(two: World) -> None:
    known = two.openai.with_options(api_key=KEYS["red"])
    answer = await known.completions.create(model="tiny", prompt=SHORT)
    assert answer.choices[0].text == "Hello there!"
    with pytest.raises(openai.AuthenticationError):
        await two.openai.completions.create(model="tiny", prompt=SHORT)


def test_a_key_is_shown_once_with_its_hash() -> None:
    shown = CliRunner().invoke(cli, ["tenant", "key"]).output
    key, line = shown.splitlines()
    assert len(key) > 40
    assert line == f'keys = ["{key_hash(key)}"]'
    assert CliRunner().invoke(cli, ["tenant", "key"]).output != shown


# What is whose


async def test_tenants_have_salts_of_their_own_on_both_legs(two: World) -> None:
    for name in ("red", "blue", "red"):
        status, _, _ = await ask(two, name, LONG)
        assert status == 200
    for engine in (two.prefill, two.decode):
        red, blue, again = (call.body["cache_salt"] for call in engine.calls)
        assert red == again != blue
    assert (await two.record())["tenant"] == "red"


async def test_users_of_a_tenant_that_isolates_them_have_salts_of_their_own(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    tables = tenants(isolate_users=True)
    async with running(checkpoint, identities, tmp_path / "state", tenants=tables) as world:
        sent: list[dict[str, Any]] = [
            {"user": "ann"},
            {"user": "bob"},
            {"safety_identifier": "ann", "user": "anyone"},
            {},
            {"user": ""},
        ]
        for fields in sent:
            status, _, _ = await ask(world, "red", LONG, **fields)
            assert status == 200
        for engine in (world.prefill, world.decode):
            ann, bob, safe, nobody, empty = (call.body["cache_salt"] for call in engine.calls)
            assert ann == safe
            assert nobody == empty
            assert len({ann, bob, nobody}) == 3
            # Pool nodes and tickets see one tenant.
            assert len({tenant_tag(salt) for salt in (ann, bob, nobody)}) == 1
            assert "ann" not in ann
        _, ticket = ticket_of(world.prefill.calls[0], identities)
        assert ticket.tenant == tenant_tag(nobody)
        status, _, answer = await ask(world, "red", SHORT, safety_identifier=["ann"])
        assert (status, answer["error"]["param"]) == (400, "safety_identifier")
        status, _, _ = await ask(world, "blue", SHORT, safety_identifier=["ann"])
        assert status == 200
        for user in ("ann", "bob"):
            await ask(world, "blue", LONG, user=user)
        one, other = (call.body["cache_salt"] for call in world.prefill.calls[-2:])
        assert one == other


async def test_pools_get_the_shares_of_tenants_by_tag_and_no_name(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    tables = tenants(cache_reserve=0.2, cache_max=0.5)
    async with running(checkpoint, identities, tmp_path / "state", tenants=tables) as world:
        tag = tenant_tag(world.gateway.tenants.by_name["red"].cache_salt)
        for pool in (world.pd_pool, world.prfaas_pool):
            assert pool.shares == {tag: (0.2, 0.5)}
        assert await world.metric('prfaas_tenant_cache_bytes{tenant="red",tier="host"}') == 0


def test_any_text_names_a_user() -> None:
    salts = {user_salt("tenant", b"secret", user) for user in ("ann", "\ud800", "a.b", "A" * 9999)}
    assert len(salts) == 4
    assert {tenant_tag(salt) for salt in salts} == {tenant_tag("tenant")}
    assert user_salt("tenant", b"other", "ann") not in salts


async def test_health_is_open_and_the_rest_is_the_operators(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    gateway = {"operator_keys": [HASHES["operator"]]}
    async with running(
        checkpoint, identities, tmp_path / "state", tenants=tenants(), gateway=gateway
    ) as world:
        lookup = "/kv/lookup?prompt=x&tenant=red"
        for path in ("/metrics", "/control/requests", "/control/links", lookup, "/other"):
            for name, expected in (("red", 403), (None, 401), ("operator", None)):
                headers = bearer(name) if name else {}
                async with world.http.get(world.url + path, headers=headers) as response:
                    assert response.status == expected or (
                        expected is None and response.status in (200, 404)
                    ), (path, name)
        async with world.http.get(f"{world.url}/health") as response:
            assert response.status == 200
        status, _, _ = await ask(world, "operator")
        assert status == 401


async def test_on_loopback_operators_need_no_key_and_tenants_have_no_right(two: World) -> None:
    for name, expected in (("red", 403), (None, 200)):
        headers = bearer(name) if name else {}
        async with two.http.get(f"{two.url}/metrics", headers=headers) as response:
            assert response.status == expected


def outside(
    checkpoint: Path, identities: Path, state: Path, caplog: pytest.LogCaptureFixture, **tables: Any
) -> tuple[Access, str]:
    """The rules of a gateway that others reach, and what it warns of."""
    deployment = deployment_for(checkpoint, identities, state, **tables)
    caplog.clear()
    table = GatewayTable(listen="0.0.0.0:8000")
    deployment = deployment.model_copy(update={"gateway": table})
    access = Access(deployment, Tenants(deployment), FactStream())
    return access, caplog.text


async def handled(access: Access, path: str) -> bool:
    async def handler(request: Any) -> Any:
        return True

    return bool(await access.check(make_mocked_request("GET", path), handler))


async def test_wider_than_loopback_there_are_warnings_and_no_open_metrics(
    checkpoint: Path, identities: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    access, warned = outside(checkpoint, identities, tmp_path / "a", caplog)
    assert "without a key" in warned
    assert await handled(access, "/v1/models")
    access, warned = outside(checkpoint, identities, tmp_path / "b", caplog, tenants=tenants())
    assert "operator_keys" in warned
    assert await handled(access, "/health")
    with pytest.raises(RequestError, match="operator_keys"):
        await handled(access, "/metrics")


# Limits


async def limited(world: World, name: str, reason: str) -> dict[str, str]:
    status, headers, body = await ask(world, name)
    assert status == 429, body
    assert headers["X-Prfaas-Reject-Reason"] == reason
    assert int(headers["Retry-After"]) >= 1
    assert body["error"]["type"] == "TooManyRequestsError"
    assert body["error"]["code"] == 429
    sample = f'prfaas_tenant_rejected_total{{reason="{reason}",tenant="{name}"}}'
    assert await world.metric(sample) >= 1
    return dict(headers)


async def test_requests_per_minute(checkpoint: Path, identities: Path, tmp_path: Path) -> None:
    tables = tenants(requests_per_minute=1)
    async with running(checkpoint, identities, tmp_path / "state", tenants=tables) as world:
        status, headers, _ = await ask(world, "red")
        assert status == 200
        assert headers["x-ratelimit-limit-requests"] == "1"
        assert headers["x-ratelimit-remaining-requests"] == "0"
        assert re.fullmatch(r"[0-9.]+s", headers["x-ratelimit-reset-requests"])
        assert "x-ratelimit-limit-tokens" not in headers
        headers = await limited(world, "red", "requests_per_minute")
        assert 1 <= int(headers["Retry-After"]) <= 60
        status, headers, _ = await ask(world, "blue")
        assert status == 200
        assert not [name for name in headers if name.lower().startswith("x-ratelimit")]
        known = world.openai.with_options(api_key=KEYS["red"])
        with pytest.raises(openai.RateLimitError):
            await known.completions.create(model="tiny", prompt=SHORT)


async def test_tokens_per_minute_count_prompt_and_output(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    tables = tenants(tokens_per_minute=1)
    async with running(checkpoint, identities, tmp_path / "state", tenants=tables) as world:
        status, headers, body = await ask(world, "red", stream=False)
        assert status == 200
        assert body["usage"]["total_tokens"] == len(SHORT) + 3
        assert headers["x-ratelimit-remaining-tokens"] == "0"
        await limited(world, "red", "tokens_per_minute")
        for kind, count in (("prompt", len(SHORT)), ("output", 3)):
            sample = f'prfaas_tenant_tokens_total{{kind="{kind}",tenant="red"}}'
            assert await world.metric(sample) == count


async def test_output_of_a_stream_that_its_client_leaves_is_counted(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    tables = tenants(tokens_per_minute=10_000)
    async with running(checkpoint, identities, tmp_path / "state", tenants=tables) as world:
        world.decode.script = stream_then_hang(2)
        body = {"prompt": SHORT, "stream": True}
        async with world.http.post(
            f"{world.url}/v1/completions", json=body, headers=bearer("red")
        ) as response:
            for _ in range(2):
                assert (await response.content.readuntil(b"\n\n")).startswith(b"data: {")
        await asyncio.wait_for(world.decode.gone.wait(), 30)
        tokens = world.gateway.tenants.by_name["red"].quota.tokens
        assert tokens is not None
        await until(lambda: world.gateway.records.latest(1)[0].outcome.value == "cancelled")
        assert world.gateway.records.latest(1)[0].num_output_tokens == 2


async def test_requests_in_flight(checkpoint: Path, identities: Path, tmp_path: Path) -> None:
    tables = tenants(requests_in_flight=2)
    async with running(checkpoint, identities, tmp_path / "state", tenants=tables) as world:
        world.decode.script = hang
        running_now = [asyncio.create_task(ask(world, "red")) for _ in range(2)]
        await until(lambda: len(world.decode.calls) == 2)
        assert await world.metric('prfaas_tenant_requests_in_flight{tenant="red"}') == 2
        await limited(world, "red", "requests_in_flight")
        for task in running_now:
            task.cancel()
        await asyncio.gather(*running_now, return_exceptions=True)
        world.decode.script = None
        await until(lambda: world.gateway.tenants.by_name["red"].quota.num_in_flight == 0)
        status, _, _ = await ask(world, "red")
        assert status == 200


async def test_what_is_over_the_links_share_is_prefilled_at_home(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    tables = tenants(link_rate="8bps", weight=4.0)
    async with running(checkpoint, identities, tmp_path / "state", tenants=tables) as world:
        # 22 kB of blocks leave the byte a second in debt.
        for path, reason in (("remote", "above_threshold"), ("local", "link_limit")):
            status, headers, _ = await ask(world, "red", LONG)
            assert status == 200
            assert headers["X-Prfaas-Path"] == path
            assert headers["X-Prfaas-Reason"] == reason
        _, headers, _ = await ask(world, "blue", LONG)
        assert headers["X-Prfaas-Path"] == "remote"
        first, second = (ticket_of(call, identities)[1] for call in world.prefill.calls)
        assert (first.weight, first.bytes_per_s) == (4.0, 1)
        assert (second.weight, second.bytes_per_s) == (1.0, 0)
        sample = 'prfaas_tenant_link_bytes_total{tenant="red"}'
        assert await world.metric(sample) == 20 * 1024 + 2048


async def test_a_full_gateway_is_shared(checkpoint: Path, identities: Path, tmp_path: Path) -> None:
    gateway = {"requests_max": 5}
    async with running(
        checkpoint, identities, tmp_path / "state", tenants=tenants(), gateway=gateway
    ) as world:
        world.decode.script = hang
        greedy = [asyncio.create_task(ask(world, "red")) for _ in range(5)]
        await until(lambda: len(world.decode.calls) == 5)
        await limited(world, "blue", "gateway_full")
        greedy[0].cancel()
        await until(lambda: world.gateway.tenants.by_name["red"].quota.num_in_flight == 4)
        await limited(world, "red", "gateway_full")
        blue = asyncio.create_task(ask(world, "blue"))
        await until(lambda: len(world.decode.calls) == 6)
        for task in (*greedy, blue):
            task.cancel()
        await asyncio.gather(*greedy, blue, return_exceptions=True)


async def test_the_dispatcher_knows_whose_a_request_is_and_shares_by_the_same_weights(
    two: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond this the simulator runs it, and tests/core/admission/test_fair_share.py tests it."""
    seen = []
    decide = Dispatcher.decide

    def noting(self: Dispatcher, arrival: Arrival, *rest: Any, **more: Any) -> Any:
        seen.append(arrival.tenant)
        return decide(self, arrival, *rest, **more)

    monkeypatch.setattr(Dispatcher, "decide", noting)
    await ask(two, "red")
    await ask(two, "blue")
    assert seen == ["red", "blue"]


def test_weights_are_those_of_the_deployment_file(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    deployment = deployment_for(checkpoint, identities, tmp_path, tenants=tenants(weight=3.0))
    assert fairness(deployment).weights == {"red": 3.0, "blue": 1.0}


# Secrets


async def test_keys_prompts_and_salts_are_in_no_log_metric_record_or_trace(
    checkpoint: Path,
    identities: Path,
    tmp_path: Path,
    collector: tuple[Collector, str],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen, endpoint = collector
    tables = {"tracing": {"endpoint": endpoint}, "tenants": tenants()}
    async with running(checkpoint, identities, tmp_path / "state", **tables) as two:
        shown = await shown_of_a_run(two, caplog)
    shown += "".join(capsys.readouterr()) + seen.raw.decode(errors="replace")
    for expected in ("request ", "prfaas_tenant_tokens_total", "gen_ai.usage.input_tokens"):
        assert expected in shown
    salts = [tenant.cache_salt for tenant in two.gateway.tenants.by_name.values()]
    hashes = [text.removeprefix("sha256:") for text in HASHES.values()]
    for secret in (*KEYS.values(), *salts, *hashes, "secret"):
        assert secret not in shown


async def shown_of_a_run(two: World, caplog: pytest.LogCaptureFixture) -> str:
    """Logs and pages of a gateway that was asked well and badly."""
    caplog.set_level("DEBUG")
    for prompt in ("secret short", "secret long " * 30):
        for stream in (False, True):
            async with two.http.post(
                f"{two.url}/v1/completions",
                json={"prompt": prompt, "stream": stream},
                headers=bearer("red"),
            ) as response:
                assert response.status == 200
                await response.read()
    wrong = "sk-secret-guess"
    headers = {"Authorization": f"Bearer {wrong}"}
    async with two.http.post(
        f"{two.url}/v1/completions", json={"prompt": "secret short"}, headers=headers
    ) as response:
        assert wrong not in await response.text()
    two.decode.words = ("secret words",)
    two.decode.script = die_after(1)
    await ask(two, "blue", "secret short", stream=False)
    shown = caplog.text
    for url in ("/metrics", "/control/requests", "/health", "/control/links"):
        async with two.http.get(two.url + url) as response:
            assert response.status == 200
            shown += await response.text()
    return shown
