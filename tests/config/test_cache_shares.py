"""Shares of pools in the deployment file."""

import pytest
from pydantic import ValidationError

from prfaas.config.deployment import GatewayTable
from prfaas.config.tenants import TenantTable, check_shares, max_ages

KEY = "sha256:" + "0" * 64


def table(**share: float) -> TenantTable:
    return TenantTable.model_validate({"keys": [KEY], **share})


def test_without_the_keys_a_tenant_has_no_share() -> None:
    assert not table().has_share
    assert table(cache_reserve=0.1).has_share
    assert table(cache_max=0.9).has_share


def test_reserves_may_be_three_quarters_together() -> None:
    check_shares({name: table(cache_reserve=0.25) for name in "abc"})
    with pytest.raises(ValueError, match=r"together is 0\.76, the limit is 0\.75"):
        check_shares({"a": table(cache_reserve=0.5), "b": table(cache_reserve=0.26)})


def test_a_reserve_above_the_limit_is_refused_with_its_tenant() -> None:
    with pytest.raises(ValueError, match=r"tenants\.a\.cache_reserve is 0\.5, more than .* 0\.4"):
        check_shares({"a": table(cache_reserve=0.5, cache_max=0.4)})


@pytest.mark.parametrize(
    "share",
    [{"cache_reserve": -0.1}, {"cache_reserve": 0.8}, {"cache_max": 0.0}, {"cache_max": 1.1}],
)
def test_a_share_is_a_ratio(share: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        table(**share)


def test_ages_are_by_tag_and_the_default_is_for_all_others() -> None:
    hour, day = 3600 * 10**9, 86_400 * 10**9
    tenants = {
        "a": TenantTable.model_validate({"keys": [KEY], "cache_max_age": "1h"}),
        "b": TenantTable.model_validate({"keys": [KEY]}),
    }
    tags = {"a": "a" * 32, "b": "b" * 32}
    assert tenants["a"].cache_max_age == hour
    assert max_ages(tenants, tags, None) == {"a" * 32: 3600}
    assert max_ages(tenants, tags, day) == {"": 86_400, "a" * 32: 3600, "b" * 32: 86_400}
    assert max_ages({}, {"default": "d" * 32}, day) == {"": 86_400, "d" * 32: 86_400}


def test_an_age_below_a_minute_is_refused() -> None:
    with pytest.raises(ValidationError, match="the least is 1min"):
        TenantTable.model_validate({"keys": [KEY], "cache_max_age": "59s"})
    with pytest.raises(ValueError, match=r"15\.00 s are too short .* the least is 1min"):
        TenantTable.model_validate({"keys": [KEY], "cache_max_age": "15s"})
    with pytest.raises(ValidationError, match="the least is 1min"):
        GatewayTable.model_validate({"cache_max_age": "59s"})
