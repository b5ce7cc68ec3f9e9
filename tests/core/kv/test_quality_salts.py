"""Salts of quality classes: no two classes, tenants or users share one, and all have their tenant's
tag."""

from __future__ import annotations

from itertools import product

from prfaas.core.codec.codecs import Quality
from prfaas.core.kv.naming.hash_chain import hash_chain
from prfaas.core.kv.tenant_salts import (
    class_salt,
    class_secret_of,
    salt_of,
    tenant_tag,
    user_salt,
    user_secret_of,
)

SECRET = b"secret of the deployment"


def salt(tenant: str, user: str, quality: Quality) -> str:
    found = salt_of(SECRET, tenant)
    if user:
        found = user_salt(found, user_secret_of(SECRET, tenant), user)
    if quality.is_lossy:
        found = class_salt(found, class_secret_of(SECRET, tenant), quality)
    return found


def test_no_two_classes_tenants_or_users_share_a_salt_or_a_block() -> None:
    who = list(product(("red", "blue"), ("", "ann", "bob"), Quality))
    salts = {each: salt(*each) for each in who}

    assert len(set(salts.values())) == len(who)
    for (tenant, _, _), found in salts.items():
        assert tenant_tag(found) == tenant_tag(salt_of(SECRET, tenant))
    tokens = list(range(64))
    chains = [
        hash_chain(tokens, tokens_per_hash=16, seed="0", cache_salt=found)
        for found in salts.values()
    ]
    names = [name for chain in chains for name in chain]
    assert len(set(names)) == len(names) == 4 * len(who)


def test_another_secret_gives_other_salts() -> None:
    own = class_salt("tenant", class_secret_of(SECRET, "red"), Quality.FP8)

    assert own != class_salt("tenant", class_secret_of(b"another", "red"), Quality.FP8)
