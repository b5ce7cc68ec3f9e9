"""EndpointSlices are listed and watched; an API server that fails takes nobody away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from prfaas.config.services import KubernetesTable
from prfaas.core.membership.members import Listed, Member, MemberKind, RefusalCause, RefusedEntry
from prfaas.errors import ConfigError
from prfaas.membership.endpoint_slices import (
    EndpointSlice,
    SliceMembers,
    members_in,
    read_slice,
)
from prfaas.membership.kubernetes import Kubernetes, WatchTiming

from .fake_api import FakeApi, Slice, endpoint, endpoint_slice

POOLS = {"prfaas/kind": "pool", "prfaas/cluster": "pd"}
ENGINES = {"prfaas/kind": "engine", "prfaas/cluster": "pd"}
HTTP = {"http": 8100}
TIMING = WatchTiming(backoff_s=0.01, backoff_max_s=0.05, connect_s=1.0, list_s=0.5, silence_s=0.5)


def pools() -> Slice:
    return endpoint_slice("pools-x", POOLS, {"link": 7100}, endpoint("pool-a", "10.0.0.1"))


def engine(number: int, **conditions: bool) -> Slice:
    pod = endpoint(f"e{number}", f"10.0.1.{number}", **conditions)  # type: ignore[arg-type]
    return endpoint_slice(f"engine-{number}", ENGINES, HTTP, pod)


class Followed:
    """A source that runs, and what it listed last."""

    def __init__(self, source: Kubernetes) -> None:
        self.source = source
        self.listed: dict[str, Listed] = {}
        self.refused: Sequence[RefusedEntry] = ()
        self.num_calls = 0

    def on_list(self, listed: Sequence[Listed], refused: Sequence[RefusedEntry]) -> None:
        self.listed, self.refused = {each.member.name: each for each in listed}, refused
        self.num_calls += 1

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 - nobody signals it; the test's timeout is the limit
            await asyncio.sleep(0.005)

    async def names(self, *names: str) -> None:
        """Wait until these are listed."""
        await self.until(lambda: set(self.listed) == set(names))


@asynccontextmanager
async def following(api: FakeApi, account: Path) -> AsyncIterator[Followed]:
    (account / "token").write_text("first")
    table = KubernetesTable(url=api.url, namespace="prfaas", service_account=account)
    followed = Followed(Kubernetes(table, TIMING))
    task = asyncio.create_task(followed.source.follow(followed.on_list))
    try:
        yield followed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    made = FakeApi()
    for found in (pools(), engine(1), engine(2)):
        await made.put(found)
    await made.start()
    yield made
    await made.stop()


def test_a_slice_is_read_as_members() -> None:
    labels = ENGINES | {"prfaas/model": "tiny"}
    ports = {"https": 8100, "kv-events": 5557, "kv-replay": 5558}
    slices = [
        pools(),
        endpoint_slice(
            "engines-x",
            labels,
            ports,
            endpoint("e1", "10.0.1.1"),
            endpoint("e2", "10.0.1.2", ready=False),
            endpoint("e3", "10.0.1.3", ready=False, terminating=True),
            endpoint("e4", "10.0.1.4", node="node-9"),
            endpoint("E5", "10.0.1.5"),
        ),
    ]
    listed, refused = members_in(map(read_slice, slices))
    events = (("kv_events", "tcp://10.0.1.1:5557"), ("kv_events_replay", "tcp://10.0.1.1:5558"))
    found = {each.member.name: each for each in listed}
    assert found["pool-a"] == Listed(Member("pool-a", MemberKind.POOL, "pd", "10.0.0.1:7100"))
    assert found["e1"] == Listed(
        Member(
            "e1", MemberKind.ENGINE, "pd", "https://10.0.1.1:8100", "pool-a", "both", "tiny", events
        )
    )
    states = {name: (each.is_ready, each.is_ending) for name, each in found.items()}
    assert states["e2"] == (False, False)
    assert states["e3"] == (False, True)
    assert found["e4"].member.pool == "", "there is no pool node on its node"
    assert [(each.name, each.reason) for each in refused] == [("E5", RefusalCause.INVALID)]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("old", [{"ready": False, "terminating": True}, {"ready": False}])
def test_a_ready_pod_takes_the_name_of_one_that_ends_or_is_not_ready(
    old: dict[str, Any], is_first: bool
) -> None:
    """A pod of a StatefulSet comes back with its name and another address."""
    ends = [endpoint("e1", "10.0.1.1", **old), endpoint("e1", "10.0.1.9")]
    found = endpoint_slice("engines-x", ENGINES, HTTP, *(ends if is_first else ends[::-1]))
    listed, refused = members_in([read_slice(found)])
    assert [(each.member.address, each.is_ready) for each in listed] == [
        ("http://10.0.1.9:8100", True)
    ]
    assert not refused


def test_a_pod_that_is_not_ready_yet_takes_the_name_of_one_that_ends() -> None:
    ends = endpoint("e1", "10.0.1.1", ready=False, terminating=True)
    found = endpoint_slice("x", ENGINES, HTTP, ends, endpoint("e1", "10.0.1.9", ready=False))
    (listed,), _ = members_in([read_slice(found)])
    assert listed.member.address == "http://10.0.1.9:8100"


@pytest.mark.parametrize("families", [("10.0.1.1", "fd00::1"), ("fd00::1", "10.0.1.1")])
def test_a_service_with_both_families_has_each_pod_once(families: tuple[str, str]) -> None:
    slices = [
        endpoint_slice(f"e-{n}", ENGINES, HTTP, endpoint("e1", place), endpoint("e2", place + "2"))
        for n, place in enumerate(families)
    ]
    listed, refused = members_in(map(read_slice, slices))
    assert sorted(each.member.address for each in listed) == [
        "http://10.0.1.12:8100",
        "http://10.0.1.1:8100",
    ]
    assert not refused
    only = endpoint_slice("e-6", ENGINES, HTTP, endpoint("e1", "fd00::1"))
    (single,), _ = members_in([read_slice(only)])
    assert single.member.address == "http://[fd00::1]:8100"


def test_two_ready_pods_of_one_name_are_both_listed_and_refused_later() -> None:
    found = endpoint_slice(
        "x", ENGINES, HTTP, endpoint("e1", "10.0.1.1"), endpoint("e1", "10.0.1.9")
    )
    listed, _ = members_in([read_slice(found)])
    assert len(listed) == 2


@pytest.mark.parametrize(
    ("labels", "ports", "words"),
    [
        ({"prfaas/kind": "boss"}, HTTP, "label prfaas/kind is 'boss'"),
        (ENGINES, {"other": 1}, "its Service has no port 'http'"),
        (POOLS, {"other": 1}, "its Service has no port 'link'"),
    ],
)
def test_an_endpoint_that_is_no_member_is_refused_in_words(
    labels: dict[str, str], ports: dict[str, int], words: str
) -> None:
    odd = read_slice(endpoint_slice("x", labels, ports, endpoint("e1", "10.0.1.1")))
    listed, (refused,) = members_in([odd])
    assert not listed
    assert words in refused.words


async def test_a_list_in_pages_and_then_a_watch(api: FakeApi, tmp_path: Path) -> None:
    async with following(api, tmp_path) as followed:
        await followed.names("pool-a", "e1", "e2")
        await api.put(engine(3))
        await followed.names("pool-a", "e1", "e2", "e3")
        await api.put(engine(1, ready=False))
        await followed.until(lambda: not followed.listed["e1"].is_ready)
        await api.delete("engine-2")
        await followed.names("pool-a", "e1", "e3")
        assert followed.source.num_lists == 1


async def test_a_watch_that_ends_goes_on_where_it_was(api: FakeApi, tmp_path: Path) -> None:
    async with following(api, tmp_path) as followed:
        await followed.names("pool-a", "e1", "e2")
        await followed.until(lambda: bool(api.watches_from))
        await api.bookmark()
        await followed.until(lambda: followed.source._version == str(api.version))
        await api.cut()
        await api.put(engine(3))
        await followed.names("pool-a", "e1", "e2", "e3")
        assert followed.source.num_lists == 1
        assert api.watches_from[-1] > api.watches_from[0]


async def test_a_version_that_is_too_old_is_followed_by_a_list(
    api: FakeApi, tmp_path: Path
) -> None:
    async with following(api, tmp_path) as followed:
        await followed.names("pool-a", "e1", "e2")
        # By an error event, and by the status of a new watch.
        for number in (3, 4):
            before = followed.source.num_lists
            if number == 4:
                await api.cut()
            api.slices[f"engine-{number}"] = engine(number)
            await api.expire()
            await followed.until(lambda: f"e{number}" in followed.listed)  # noqa: B023
            assert followed.source.num_lists > before


async def test_the_last_list_stays_while_the_server_is_away(api: FakeApi, tmp_path: Path) -> None:
    async with following(api, tmp_path) as followed:
        await followed.names("pool-a", "e1", "e2")
        num_calls, port = followed.num_calls, int(api.url.rpartition(":")[2])
        await api.stop()
        await followed.until(lambda: "cannot be used" in followed.source.fault)
        since_s = followed.source.current_at_s
        assert followed.num_calls == num_calls
        await api.start(port)
        await api.put(engine(3))
        await followed.names("pool-a", "e1", "e2", "e3")
        assert not followed.source.fault
        assert followed.source.current_at_s > since_s


async def test_a_server_that_hangs_or_refuses_takes_nobody_away(
    api: FakeApi, tmp_path: Path
) -> None:
    async with following(api, tmp_path) as followed:
        await followed.names("pool-a", "e1", "e2")
        num_calls = followed.num_calls
        api.is_hanging = True
        await api.cut()
        await followed.until(lambda: "does not answer in time" in followed.source.fault)
        api.is_hanging, api.status = False, 403
        await followed.until(lambda: "status 403" in followed.source.fault)
        assert followed.num_calls == num_calls
        api.status = 200
        await followed.until(lambda: not followed.source.fault)
        await api.put(engine(3))
        await followed.names("pool-a", "e1", "e2", "e3")


async def test_the_token_is_read_again(api: FakeApi, tmp_path: Path) -> None:
    async with following(api, tmp_path) as followed:
        await followed.names("pool-a", "e1", "e2")
        (tmp_path / "token").write_text("second\n")
        await api.cut()
        await followed.until(lambda: api.tokens[-1] == "Bearer second")
    assert api.tokens[0] == "Bearer first"


def test_without_an_address_the_next_step_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="give the URL of the API server"):
        Kubernetes(KubernetesTable())
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert Kubernetes(KubernetesTable())._base == "https://[fd00::1]:443"


def test_only_slices_that_changed_are_read_again() -> None:
    labels = {"prfaas/kind": "engine", "prfaas/cluster": "pd", "prfaas/role": "both"}
    pool = {"prfaas/kind": "pool", "prfaas/cluster": "pd", "prfaas/name": "pd-a"}

    def engines(name: str, address: str) -> EndpointSlice:
        return read_slice(endpoint_slice(name, labels, {"http": 8100}, endpoint(name, address)))

    def pools(node: str) -> EndpointSlice:
        found = endpoint("pod", "10.0.0.9", node)
        return read_slice(endpoint_slice("pools", pool, {"link": 7100}, found))

    slices = {name: engines(name, f"10.0.0.{n}") for n, name in enumerate(("a", "b"))}
    slices["pools"], members = pools("node-1"), SliceMembers()

    def listed() -> dict[str, Listed]:
        found, refused = members.read(slices)
        assert not refused
        assert (found, refused) == members_in(slices.values())
        return {each.member.name: each for each in found}

    before = listed()
    assert before["a"].member.pool == "pd-a"
    slices["b"] = engines("b", "10.0.0.7")
    after = listed()
    assert after["a"] is before["a"]
    assert after["b"].member.address == "http://10.0.0.7:8100"
    # The pool node of a host concerns all engines on it.
    slices["pools"] = pools("node-2")
    assert listed()["a"].member.pool == ""
    del slices["b"]
    assert listed().keys() == {"a", "pd-a"}
