"""Names of recent prompts: bounded, and never those of another tenant."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import RequestError
from prfaas.gateway.telemetry.recent_names import REQUEST_BYTES, RecentNames
from prfaas.purge.intents import Intents
from prfaas.purge.targets import Target


def tag_of(tenant: str) -> str:
    return tenant * 32


def target_of(names: RecentNames, request: str) -> Target:
    recent = names.find(request)
    return Target.of(recent, tag_of(recent.tenant))


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 40)), max_size=60)
)
def test_memory_is_bounded_and_counted(prompts: list[tuple[str, int, int]]) -> None:
    limit = 4 * REQUEST_BYTES
    names = RecentNames(limit, requests_max=3)
    for tenant, request, num_blocks in prompts:
        names.keep(f"request-{request}", tenant, [bytes(32)] * num_blocks)
        assert names.num_bytes <= limit
        assert len(names) <= 3
        tenants = names._names.values()
        kept = [REQUEST_BYTES + len(each) for found in tenants for each, _ in found.values()]
        assert (names.num_bytes, len(names)) == (sum(kept), len(kept))
        assert names._names.keys() == names._shares.keys()


def test_the_last_prompts_are_found_by_id_and_by_its_beginning() -> None:
    names = RecentNames(1 << 20, requests_max=2)
    for number in range(3):
        names.keep(f"{number}-request", "a", [bytes([number]) * 32, b"x" * 32])
    target = target_of(names, "2-request")
    assert target == Target(
        tenant="a", tag="a" * 32, request="2-request", hashes=bytes([2]) * 32 + b"x" * 32
    )
    assert target_of(names, "2-reques") == target
    for unknown in ("0-request", "2-r", ""):
        with pytest.raises(RequestError, match="no such request"):
            target_of(names, unknown)


def test_an_id_of_two_tenants_is_found_with_the_name_of_one() -> None:
    """A tenant that repeats the id of another one's request keeps no operator from it."""
    names = RecentNames(1 << 20)
    names.keep("the-request", "a", [b"a" * 32])
    names.keep("the-request", "b", [b"b" * 32])
    with pytest.raises(RequestError, match="give one of a/the-request, b/the-request"):
        target_of(names, "the-request")
    for request in ("a/the-request", "a/the-requ"):
        target = target_of(names, request)
        assert (target.tenant, target.hashes) == ("a", b"a" * 32)


def test_an_id_that_looks_like_another_tenants_hides_nothing() -> None:
    names = RecentNames(1 << 20)
    names.keep("the-request", "a", [b"a" * 32])
    names.keep("a/the-request", "b", [b"b" * 32])
    names.keep("a", "b", [b"c" * 32])
    assert target_of(names, "a/the-request").hashes == b"a" * 32
    assert target_of(names, "b/a/the-request").hashes == b"b" * 32
    assert target_of(names, "b/a").hashes == b"c" * 32


@pytest.mark.parametrize("num_blocks", [1, 100])
def test_a_tenant_does_not_have_the_names_of_others_forgotten(num_blocks: int) -> None:
    """By many requests, or by long ones."""
    names = RecentNames(100_000, requests_max=100)
    for number in range(10):
        names.keep(f"mine-{number}", "a", [bytes([number]) * 32])
    for number in range(1000):
        names.keep(f"flood-{number}", "b", [b"x" * 32] * num_blocks)
    assert [target_of(names, f"a/mine-{n}").hashes[0] for n in range(10)] == list(range(10))
    for number in range(1000):
        names.keep(f"also-{number}", "a", [b"y" * 32])
    assert "b" in names._names, "an equal part each"


def test_without_memory_none_are_kept() -> None:
    names = RecentNames(0)
    names.keep("the-request", "a", [b"a" * 32])
    assert len(names) == 0
    with pytest.raises(RequestError, match="keeps no names"):
        target_of(names, "the-request")


def test_a_purge_of_the_longest_prompt_survives_a_crash(tmp_path: Path) -> None:
    target = Target(tenant="a", tag="a" * 32, request="r", hashes=b"h" * (4 << 20))
    intents = Intents(tmp_path, "gateway")
    intents.begin(target)
    assert intents.pending() == [target]
    intents.end(target)
    assert intents.pending() == []
