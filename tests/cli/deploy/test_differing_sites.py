"""A whole deployment whose clusters differ: it starts, serves locally, and says what differs."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from prfaas.cli.deploy.topology import parts
from prfaas.cli.preflight.readiness import incomplete
from tests.deployments import TIMING, laid_out, placed, started

pytestmark = pytest.mark.timeout(400)


async def test_clusters_that_differ_are_started_and_the_difference_is_named(
    tmp_path: Path,
) -> None:
    overlay = "[clusters.pd.timing]\nblock_tokens = 1024\n"
    topology = await laid_out(*placed(TIMING, tmp_path, overlay))
    async with started(parts(topology)), aiohttp.ClientSession() as http:
        url, model = topology.gateway_url, topology.deployment.model.name
        body = {"model": model, "prompt": "long " * 6_000, "max_tokens": 4}
        async with http.post(f"{url}/v1/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            assert reply.headers["X-Prfaas-Path"] == "local"
            assert reply.headers["X-Prfaas-Reason"] == "layout_mismatch"
        said = await incomplete(url)
    assert said is not None
    assert "block_tokens: 1024 at pd-" in said
    assert ", 256 at prfaas-" in said
