"""A real vLLM engine killed with SIGKILL: the next start gives its host memory back."""

import asyncio
import signal
from pathlib import Path

import aiohttp
import pytest

from prfaas.cli.deploy.topology import parts
from prfaas.cli.host.processes import ProcessPart
from prfaas.cli.supervision.keeper import answers
from prfaas.engines.shared_memory import remove_abandoned
from tests.deployments import LAPTOP, laid_out, placed

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


async def ready(part: ProcessPart) -> None:
    async with aiohttp.ClientSession() as http:
        while not await answers(http, part.health_url):
            assert part.exit_code is None, part.last_words()
            await asyncio.sleep(0.1)


async def test_memory_of_a_killed_engine_is_given_back_by_the_next_start(tmp_path: Path) -> None:
    stages = parts(await laid_out(*placed(LAPTOP, tmp_path)))
    by_name = {part.name: part for stage in stages for part in stage}
    pool, engine = by_name["pd-pool"], by_name["pd-engine"]
    (pattern,) = engine.leftovers
    try:
        pool.start()
        await ready(pool)
        engine.start()
        await ready(engine)
        held = sorted(path.suffix for path in pattern.parent.glob(pattern.name))
        assert held == [".mmap", ".owner"]
        engine.signal(signal.SIGKILL)
        while not engine.is_gone():  # noqa: ASYNC110 - processes signal nothing
            await asyncio.sleep(0.01)
        # Nobody cleans up: whoever started it is thought to be gone as well. A deployment
        # that another test starts meanwhile may do it first.
        remove_abandoned()
        assert list(pattern.parent.glob(pattern.name)) == []
    finally:
        for part in (engine, pool):
            await part.clean_up()
