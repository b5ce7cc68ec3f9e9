"""Prices and classes of service in files: what is wrong is refused with key and reason."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from prfaas.config.load import load_deployment
from prfaas.core.market.choice import PlannedSite
from prfaas.errors import ConfigError
from prfaas.market.make import site_price
from prfaas.market.price_file import read_prices
from prfaas.units import NS_PER_S
from tests.config.good_file import GOOD, toml

KEY = "sha256:" + "0" * 64


def loaded(tmp_path: Path, text: str, **routing: Any) -> Any:
    tables = copy.deepcopy(GOOD)
    tables["routing"] |= {"plan": "plan.toml", **routing}
    path = tmp_path / "deployment.toml"
    path.write_text(toml(tables) + "\n" + text)
    return load_deployment(path)


def test_prices_are_numbers_or_lists_by_time_of_day(tmp_path: Path) -> None:
    text = """[prices.far]
    gpu_hour = [{ at = "08:00", price = 3 }, { at = "20:00:30", price = 1.5 }]
    per_tb = 2
    revocable = true
    notice = "30s"
    leaves_at = 2026-11-23T18:00:00Z
    """
    found = loaded(tmp_path, text).prices["far"]
    price = site_price(PlannedSite(8, 1.0, 9.0), found)
    assert price.gpu_hour.starts_ns == (8 * 3600 * NS_PER_S, (20 * 3600 + 30) * NS_PER_S)
    assert price.gpu_hour.prices == (3, 1.5)
    assert (price.per_tb.prices, price.gpus, price.notice_ns) == ((2,), 8, 30 * NS_PER_S)
    assert site_price(PlannedSite(8, 1.0, 9.0), type(found)()).per_tb.prices == (9.0,)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[prices.far]\ngpu_hour = -1.0", r"prices\.far\.gpu_hour.*greater than or equal to 0"),
        ("[prices.far]\nper_tb = -0.1", r"prices\.far\.per_tb.*greater than or equal to 0"),
        ("[prices.far]\ngpu_hour = nan", r"prices\.far\.gpu_hour"),
        (
            '[prices.far]\ngpu_hour = [{ at = "08:00", price = -3.0 }]',
            r"prices\.far\.gpu_hour.*greater than or equal to 0",
        ),
        ('[prices.far]\ngpu_hour = [{ at = "25:00", price = 3.0 }]', r"gpu_hour.*at"),
        (
            "[prices.far]\n"
            'gpu_hour = [{ at = "08:00", price = 3.0 }, { at = "07:00", price = 1.0 }]',
            "the times 08:00, 07:00 do not rise",
        ),
        ("[prices.nowhere]\ngpu_hour = 1.0", r"prices\.nowhere: there is no cluster.*far, home"),
        ("[prices.far]\nrevocable = true", "revocable and notice belong together"),
        ("[prices.far]\nleaves_at = 2026-11-23T18:00:00", "has no offset from UTC"),
        ("[prices.far]\nreturns_at = 2026-11-23T18:00:00Z", "needs a leaves_at before it"),
        (
            f'[tenants.a]\nkeys = ["{KEY}"]\nservice_tier = "gold"',
            r"tenants\.a\.service_tier: there is no class 'gold'; \[classes\] has none",
        ),
        (
            f'[classes.gold]\n[tenants.a]\nkeys = ["{KEY}"]\nservice_tiers = ["gold", "tin"]',
            r"tenants\.a\.service_tiers: there is no class 'tin'; \[classes\] has gold",
        ),
        ('[classes.gold]\nttft = "0s"', r"classes\.gold\.ttft.*the least is 1ms"),
        ("[classes.gold]\nsecond_price = -1.0", r"classes\.gold\.second_price"),
        ("[classes.auto]\npriority = 1", r"classes\.auto: requests with service_tier"),
    ],
)
def test_what_is_wrong_is_refused_with_key_and_reason(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        loaded(tmp_path, text)


@pytest.mark.parametrize("missing", ["plan", "second_price"])
def test_the_policy_cost_needs_times_and_the_value_of_a_second(
    tmp_path: Path, missing: str
) -> None:
    tables = copy.deepcopy(GOOD)
    tables["routing"] |= {"policy": "cost", "plan": "plan.toml", "second_price": 0.1}
    del tables["routing"][missing]
    path = tmp_path / "deployment.toml"
    path.write_text(toml(tables))
    with pytest.raises(ConfigError, match=r'"cost" needs a plan|second_price needs a plan'):
        load_deployment(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[prices.far]\ngpu_hour = -1.0", r"prices\.far\.gpu_hour"),
        ("[prices.moon]\ngpu_hour = 1.0", r"prices\.moon: there is no cluster"),
        ("gpu_hour = 1.0", "gpu_hour"),
        ("[prices", "no valid TOML"),
    ],
)
def test_a_price_file_is_refused_with_key_and_reason(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_prices(path, {"far": 1, "home": 1})
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prices(tmp_path / "none.toml", {})
