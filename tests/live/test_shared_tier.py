"""A hybrid whose engines were not told a block size: what is shipped is found all the same, and
what its site keeps in an S3 bucket after engine and pool node have lost everything."""

from __future__ import annotations

import signal
from pathlib import Path

import aiohttp
import pytest

from prfaas.cli.deploy.topology import parts
from prfaas.core.routing.policies import PolicyName
from tests.deployments import LAPTOP, laid_out, placed, started
from tests.live.conftest import Live, document, gateway_over, until
from tests.live.relay import Relay
from tests.s3.fixtures import Bucket

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
SETTINGS = """
[routing]
policy = "local"
[clusters.pd.s3]
bucket = "{bucket}"
endpoint = "{endpoint}"
region = "us-east-1"
keys = "{keys}"
limit = "1GiB"
deadline = "60s"
"""
SAID = ', "--block-size", "384"'


async def is_shipped_and_found(live: Live) -> None:
    """Prompts whose last state lies at the end of a chunk of prefill, and others."""
    deployment = live.topology.deployment
    routing = deployment.routing.model_copy(update={"policy": PolicyName.PAPER})
    async with gateway_over(live, deployment.model_copy(update={"routing": routing})) as (_, over):
        for num_chars in (1600, 2000, 2300, 2700, 3500, 6000):
            text = f"[{num_chars}] " + document(num_chars)
            answer, headers = await over.chat(text, max_tokens=4)
            record = await over.record(headers["X-Request-Id"])
            assert (record["path"], record["fallback"]) == ("remote", None)
            assert answer["usage"]["completion_tokens"] == 4


async def test_a_restarted_engine_hits_in_the_bucket_and_answers_the_same(
    tmp_path: Path, bucket: Bucket
) -> None:
    made = bucket.settings
    text = SETTINGS.format(bucket=made.bucket, endpoint=made.endpoint, keys=made.keys)
    file, overlay = placed(LAPTOP, tmp_path, text)
    assert SAID in file.read_text()
    file.write_text(file.read_text().replace(SAID, ""))
    topology = await laid_out(file, overlay)
    prompt = "[bucket] " + document(6000)
    async with started(parts(topology)) as supervisor, aiohttp.ClientSession() as http:
        live = Live(topology, supervisor, Relay(topology.pools["pd-pool"]), http)
        await is_shipped_and_found(live)

        async def hits() -> int:
            return int((await live.look(prompt))["pd-pool"]["hit_tokens"])

        async def is_written() -> bool:
            admin = live.pool_admin("pd-pool")
            held = await live.metric(admin, "prfaas_pool_blocks", tier="host")
            return held == await live.metric(admin, "prfaas_pool_blocks", tier="shared") > 0

        first, _ = await live.chat(prompt)
        await until(is_written)
        stored = await hits()
        assert stored > 0
        for name in ("pd-engine", "pd-pool"):
            supervisor.part(name).signal(signal.SIGKILL)
        for name in ("pd-pool", "pd-engine"):
            await supervisor.restart(name)

        async def is_found() -> bool:
            return await hits() == stored

        await until(is_found)
        admin = live.pool_admin("pd-pool")
        assert await live.metric(admin, "prfaas_pool_blocks", tier="host") == 0
        again, headers = await live.chat(prompt)
        record = await live.record(headers["X-Request-Id"])
        assert again["choices"][0]["message"] == first["choices"][0]["message"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= stored
        assert record["fallback"] is None
        assert await live.metric(admin, "prfaas_pool_hits_total", tier="shared") > 0
