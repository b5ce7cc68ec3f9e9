"""Signing in to the console: sessions begin, end, and are nobody else's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from http.cookies import Morsel
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from prfaas.console.sign_in import AGE_MAX_NS, ID_CHARS_MAX, PER_KEY_MAX, BrowserSessions, SignIn
from prfaas.core.admission.quotas import TRIES_MAX
from prfaas.gateway.tenancy.tenants import ApiKeys, key_hash, new_key
from tests.gateway.conftest import World, running

PATH = "/console/api/session"
KEYS = {name: new_key() for name in ("alice", "victor", "scraper")}
RANKS = {"alice": "change", "victor": "view", "scraper": "metrics"}
FOREIGN: tuple[dict[str, str], ...] = (
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},  # another port of this host, to which SameSite sends cookies
    {},
)


@pytest.fixture
async def keyed(checkpoint: Path, identities: Path, tmp_path: Path) -> AsyncIterator[World]:
    operators = {n: {"keys": [key_hash(k)], "rank": RANKS[n]} for n, k in KEYS.items()}
    async with running(checkpoint, identities, tmp_path / "state", operators=operators) as made:
        yield made


def browser() -> aiohttp.ClientSession:
    """Cookies of 127.0.0.1 are kept."""
    return aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))


def own(world: World) -> dict[str, str]:
    """Headers of a browser that shows the gateway's own page."""
    return {"Origin": str(URL(world.url).origin())}


async def sign_in(
    http: aiohttp.ClientSession, world: World, key: str, **headers: str
) -> tuple[int, Any]:
    found = own(world) | headers
    async with http.post(world.url + PATH, json={"key": key}, headers=found) as reply:
        return reply.status, await reply.json()


async def get(http: aiohttp.ClientSession, world: World, path: str) -> tuple[int, Any]:
    async with http.get(world.url + path) as reply:
        return reply.status, await reply.json()


def cookie(http: aiohttp.ClientSession) -> Morsel[str]:
    [found] = http.cookie_jar
    return found


def sign_in_of(world: World) -> SignIn:
    [found] = [page for page in world.gateway.pages if isinstance(page, SignIn)]
    return found


async def test_a_session_has_the_rights_of_its_key_until_it_is_ended(keyed: World) -> None:
    async with browser() as http:
        assert (await get(http, keyed, PATH))[1]["operator"] is None
        assert (await get(http, keyed, "/console/api/state"))[0] == 401
        assert await sign_in(http, keyed, KEYS["alice"]) == (
            200,
            {"operator": "alice", "rank": "change"},
        )
        status, who = await get(http, keyed, PATH)
        assert (status, who["needs_key"], who["operator"], who["rank"]) == (
            200,
            True,
            "alice",
            "change",
        )
        assert (await get(http, keyed, "/console/api/state"))[0] == 200
        body = {"drained": True}
        url = f"{keyed.url}/control/engines/spare"
        async with http.post(url, json=body, headers=own(keyed)) as reply:
            assert reply.status == 200
            assert (await reply.json())["decisions"][0]["operator"] == "alice"
        kept = cookie(http).value
        async with http.delete(keyed.url + PATH, headers=own(keyed)) as reply:
            assert reply.status == 200
        assert not list(http.cookie_jar)
        http.cookie_jar.update_cookies({sign_in_of(keyed).cookie: kept}, URL(keyed.url))
        assert (await get(http, keyed, "/console/api/state"))[0] == 401


async def test_who_may_look_changes_nothing(keyed: World) -> None:
    async with browser() as http:
        await sign_in(http, keyed, KEYS["victor"])
        assert (await get(http, keyed, "/console/api/state"))[0] == 200
        url = f"{keyed.url}/control/loops"
        async with http.post(url, json={"frozen": True}, headers=own(keyed)) as reply:
            assert reply.status == 403
            assert "operator victor has the rank 'view'" in await reply.text()
        status, answer = await sign_in(http, keyed, KEYS["scraper"])
        assert (status, "rank 'metrics'" in answer["error"]["message"]) == (403, True)


async def test_scripts_never_see_the_cookie_and_other_sites_never_send_it(keyed: World) -> None:
    async with browser() as http:
        await sign_in(http, keyed, KEYS["alice"])
        found = cookie(http)
        assert (found["httponly"], found["samesite"], found["path"]) == (True, "Strict", "/")
        assert not found["secure"]
        assert KEYS["alice"] not in found.value
        await sign_in(http, keyed, KEYS["alice"], **{"X-Forwarded-Proto": "https"})
        assert any(each["secure"] for each in http.cookie_jar)
    names = {SignIn(keyed.gateway.access, name).cookie for name in ("gateway", "other")}
    assert len(names) == 2  # cookies know no ports


@pytest.mark.parametrize("headers", FOREIGN)
async def test_what_another_page_sends_is_refused(keyed: World, headers: dict[str, str]) -> None:
    async with browser() as http:
        await sign_in(http, keyed, KEYS["alice"])
        url = f"{keyed.url}/control/loops"
        for method, path, body in (
            ("POST", url, {"frozen": True}),
            ("DELETE", keyed.url + PATH, None),
            ("POST", keyed.url + PATH, {"key": KEYS["alice"]}),
        ):
            async with http.request(method, path, json=body, headers=headers) as reply:
                assert reply.status == 403, path
                assert "for its own page" in await reply.text()
        assert not keyed.gateway.control_ticker.frozen
        assert (await get(http, keyed, "/console/api/state"))[0] == 200
        # A key in a header is no cookie: scripts and `prfaas ctl` have no page.
        with_key = {"Authorization": f"Bearer {KEYS['alice']}", **headers}
        async with keyed.http.post(url, json={"frozen": False}, headers=with_key) as reply:
            assert reply.status == 200


async def test_a_form_of_another_site_signs_nobody_in(keyed: World) -> None:
    form = {"Content-Type": "text/plain", **own(keyed)}
    async with keyed.http.post(keyed.url + PATH, data=b'{"key":"x"}', headers=form) as reply:
        assert reply.status == 415


async def test_guesses_are_limited_and_the_right_key_opens(keyed: World) -> None:
    async with browser() as http:
        for _ in range(TRIES_MAX):
            status, answer = await sign_in(http, keyed, new_key())
            assert (status, "no operator's key" in answer["error"]["message"]) == (401, True)
        assert (await sign_in(http, keyed, new_key()))[0] == 429
        # Behind a proxy all browsers have one address: nobody can lock the others out.
        assert (await sign_in(http, keyed, KEYS["alice"]))[0] == 200
        headers = {"Authorization": f"Bearer {KEYS['alice']}"}
        async with keyed.http.get(f"{keyed.url}/control/status", headers=headers) as reply:
            assert reply.status == 200


@pytest.mark.parametrize("key", ["", "x" * 513, 7, None])
async def test_what_is_no_key_is_refused(keyed: World, key: object) -> None:
    async with browser() as http:
        async with http.post(keyed.url + PATH, json={"key": key}, headers=own(keyed)) as reply:
            assert reply.status == 400
        assert not list(http.cookie_jar)


async def test_a_key_that_is_taken_back_ends_its_sessions(keyed: World) -> None:
    async with browser() as alice, browser() as victor:
        await sign_in(alice, keyed, KEYS["alice"])
        await sign_in(victor, keyed, KEYS["victor"])
        keyed.gateway.access.operators = ApiKeys([(key_hash(KEYS["victor"]), "victor")])
        assert (await get(alice, keyed, "/console/api/state"))[0] == 401
        assert (await get(victor, keyed, "/console/api/state"))[0] == 200


async def test_without_operator_keys_nobody_signs_in(world: World) -> None:
    async with browser() as http:
        status, who = await get(http, world, PATH)
        assert (status, who["needs_key"], who["operator"], who["rank"]) == (
            200,
            False,
            None,
            "change",
        )
        assert (await sign_in(http, world, new_key()))[0] == 409


def test_sessions_are_bounded_in_number_and_age() -> None:
    sessions = BrowserSessions()
    first, *others = [sessions.begin("a", 0) for _ in range(PER_KEY_MAX)]
    other = sessions.begin("b", 0)
    assert sessions.key_hash(first, 0) == "a"
    newest = sessions.begin("a", 1)
    assert sessions.key_hash(first, 1) == ""
    assert all(sessions.key_hash(each, 1) == "a" for each in [*others, newest])
    assert sessions.key_hash(other, 1) == "b"
    assert len(sessions) == PER_KEY_MAX + 1
    assert sessions.key_hash(other, AGE_MAX_NS) == ""
    assert sessions.key_hash(newest, AGE_MAX_NS) == "a"
    sessions.begin("c", AGE_MAX_NS + 1)
    assert len(sessions) == 1


@pytest.mark.parametrize("session_id", ["", "x", "x" * (ID_CHARS_MAX + 1), "ü\ud800"])
def test_an_id_that_was_never_given_is_nobody_s(session_id: str) -> None:
    sessions = BrowserSessions()
    ids = {sessions.begin("a", 0) for _ in range(100)}
    assert len(ids) == 100
    assert all(len(each) <= ID_CHARS_MAX for each in ids)
    assert sessions.key_hash(session_id, 0) == ""
    sessions.end(session_id)


async def test_an_open_stream_ends_with_its_session(keyed: World) -> None:
    async with browser() as http:
        await sign_in(http, keyed, KEYS["victor"])
        async with http.get(keyed.url + "/console/api/events") as reply:
            await reply.content.readuntil(b"\n\n")
            async with http.delete(keyed.url + PATH, headers=own(keyed)) as ended:
                assert ended.status == 200
            await reply.content.read()


async def test_an_origin_that_is_no_address_is_foreign(keyed: World) -> None:
    async with browser() as http:
        assert (await sign_in(http, keyed, KEYS["alice"], Origin="http://["))[0] == 403


async def test_nobody_sees_the_address_of_the_traces(keyed: World) -> None:
    object.__setattr__(sign_in_of(keyed), "trace_page", "http://traces/{trace_id}")
    async with browser() as http:
        assert (await get(http, keyed, PATH))[1]["trace_page"] is None
