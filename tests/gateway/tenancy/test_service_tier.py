"""`service_tier` of a request: the class that it names, if its tenant may."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import openai
import pytest

from prfaas.cli.deploy.deployment_checks import check_targets
from prfaas.config.deployment import Deployment
from prfaas.core.market.choice import PlannedSite
from prfaas.errors import ConfigError
from prfaas.units import NS_PER_S
from tests.gateway.conftest import deployment_for, running
from tests.gateway.prompts import LONG
from tests.gateway.tenant_keys import HASHES, KEYS, bearer
from tests.plans import plan_file

CLASSES = {"gold": {"second_price": 7.0, "priority": 1}, "batch": {"second_price": 0.0}}
TENANTS = {
    "red": {"keys": [HASHES["red"]], "service_tier": "batch", "service_tiers": ["gold"]},
    "blue": {"keys": [HASHES["blue"]]},
}


async def test_a_request_may_name_a_class_that_its_tenant_is_allowed(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    routing = {"plan": str(plan_file(tmp_path)), "policy": "cost", "second_price": 1.0}
    tables: dict[str, Any] = {
        "routing": routing,
        "tenants": TENANTS,
        "classes": CLASSES,
        "gateway": {"operator_keys": [HASHES["operator"]]},
    }
    async with running(checkpoint, identities, tmp_path / "state", **tables) as world:
        world.gateway.driver.set_cluster("prfaas", time.monotonic_ns(), on=False)
        url, operator = f"{world.url}/control/requests", bearer("operator")

        async def second_price(name: str, tier: str | None) -> float:
            """Value of a second in the decision on a request."""
            extra = {} if tier is None else {"service_tier": tier}
            body = {"prompt": LONG, "max_tokens": 2, **extra}
            endpoint = f"{world.url}/v1/completions"
            async with world.http.post(endpoint, json=body, headers=bearer(name)) as answer:
                assert answer.status == 200
                number = answer.headers["X-Request-Id"]
            async with world.http.get(f"{url}/{number}/explanation", headers=operator) as answer:
                found = await answer.json()
            [local] = [each for each in found["costs"] if each["cluster"] == "pd"]
            return float(local["time"] / found["decision"]["predicted_local_ms"] * 1e3)

        assert await second_price("red", None) == 0
        assert await second_price("red", "auto") == 0
        assert await second_price("red", "default") == 0
        assert await second_price("red", "gold") == pytest.approx(7, rel=0.01)
        assert await second_price("blue", None) == pytest.approx(1, rel=0.01)
        for name, tier in (("blue", "gold"), ("red", "silver")):
            client = openai.AsyncOpenAI(
                base_url=f"{world.url}/v1", api_key=KEYS[name], max_retries=0
            )
            async with client:
                with pytest.raises(openai.BadRequestError, match="not allowed") as caught:
                    await client.completions.create(
                        model="tiny", prompt="x", extra_body={"service_tier": tier}
                    )
            assert caught.value.param == "service_tier"


def made(checkpoint: Path, identities: Path, tmp_path: Path, ttft: str) -> Deployment:
    routing = {"plan": str(plan_file(tmp_path))}
    classes = {"gold": {"ttft": ttft}}
    return deployment_for(checkpoint, identities, tmp_path, routing=routing, classes=classes)


def test_a_target_below_the_round_trip_of_every_link_is_refused(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    sites = {
        "pd": PlannedSite(8, 1.0),
        "near": PlannedSite(8, 1.0, 0.0, NS_PER_S // 100),
        "far": PlannedSite(8, 1.0, 0.0, NS_PER_S // 10),
    }
    with pytest.raises(ConfigError, match=r"classes\.gold\.ttft: .* below the round trip.*near"):
        check_targets(made(checkpoint, identities, tmp_path, "9ms"), sites)
    check_targets(made(checkpoint, identities, tmp_path, "10ms"), sites)
