"""Rules of what a pool node keeps: orders with an end, announced ages, and their limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.cache.keep_rules import ORDERS_MAX, Effect, KeepRules, Origin, Scope
from prfaas.core.cache.tenant_shares import Share
from prfaas.core.kv.blocks import BlockKey

TENANT, OTHER = "ab" * 16, "cd" * 16
HASH = b"h" * 32
PROMPT = Scope(tenant=TENANT, hashes=frozenset({HASH}))
SCOPES = [Scope("bad"), Scope("pd-pool"), Scope(tenant=TENANT), Scope(tenant=""), PROMPT]
BAD = Origin(frozenset({"bad"}))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["order", "end", "expire"]),
            st.sampled_from(["a", "b"]),
            st.sampled_from(SCOPES),
            st.integers(1, 20),
        ),
        max_size=40,
    )
)
def test_a_block_is_barred_while_an_order_on_it_is_in_force(
    steps: list[tuple[str, str, Scope, int]],
) -> None:
    rules, in_force = KeepRules("pd-pool"), dict[tuple[str, Scope], int]()
    for what, gateway, scope, at in steps:
        key = gateway, Effect.PURGE, scope
        if what == "order":
            assert rules.order(key, at) == ""
            in_force[gateway, scope] = at
        elif what == "end":
            assert rules.end(key) == (in_force.pop((gateway, scope), None) is not None)
        else:
            rules.expire(at)
            in_force = {each: until for each, until in in_force.items() if until > at}
        rules.validate()
        scopes = {scope for _, scope in in_force}
        for origin in (BAD, Origin(tenant=TENANT), Origin(tenant=OTHER)):
            is_barred = any(s.hashes is None and s.covers(origin, "pd-pool") for s in scopes)
            assert rules.may_keep(origin, b"other") == (not is_barred)
            assert rules.may_keep(origin, HASH) == (not is_barred and PROMPT not in scopes)


def test_orders_of_a_gateway_are_bounded_and_those_of_others_are_not_touched() -> None:
    rules = KeepRules()
    for number in range(ORDERS_MAX[Effect.PURGE]):
        assert rules.order(("a", Effect.PURGE, Scope(f"pool-{number}")), 1) == ""
    assert "a has 256 purges here" in rules.order(("a", Effect.PURGE, Scope("more")), 1)
    assert rules.order(("a", Effect.PURGE, Scope("pool-0")), 2) == "", "a new end"
    assert rules.order(("a", Effect.PIN, b"digest"), 1) == ""
    assert rules.order(("b", Effect.PURGE, Scope("more")), 1) == ""
    rules.validate()
    rules._ends["a", Effect.PURGE, Scope("smuggled")] = 1
    with pytest.raises(AssertionError, match="a has 257 orders to purge"):
        rules.validate()


def test_a_prompt_without_blocks_is_nothing_and_not_the_whole_tenant() -> None:
    scope = Scope(tenant=TENANT, hashes=frozenset())
    rules = KeepRules()
    rules.order(("a", Effect.PURGE, scope), 1)
    assert not scope.has((bytes(32), BlockKey(0, HASH)))
    assert rules.may_keep(Origin(tenant=TENANT), HASH)


def test_the_strictest_age_counts_and_a_gateway_replaces_its_own() -> None:
    rules = KeepRules(now_s=lambda: 1000.0)
    block = Origin(tenant=TENANT, born_s=900)
    rules.announced("a", {TENANT: 200}, {TENANT: Share(0.5, 1.0)})
    assert rules.may_read(block)
    rules.announced("b", {TENANT: 100}, {OTHER: Share(0.1, 0.2)})
    assert (rules.may_read(block), rules.may_keep(block)) == (False, False)
    assert rules.may_read(replace(block, tenant=OTHER))
    assert rules.shares == {TENANT: Share(0.5, 1.0), OTHER: Share(0.1, 0.2)}
    rules.announced("b", {}, {})
    assert rules.may_read(block)
    assert rules.shares == {TENANT: Share(0.5, 1.0)}
