"""Hit rates of the Mooncake conversation trace with least-recently-used caches."""

import pytest

from prfaas.core.cache.prefix_cache import PrefixCache
from prfaas.sim.system.request import Request
from prfaas.sim.workloads.requests import Trace
from prfaas.traces.reader import read_requests
from tests.sim.systems import EXAMPLES

CONVERSATION = EXAMPLES / "traces" / "mooncake_conversation.jsonl.gz"


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return Trace(read_requests(CONVERSATION).rows).requests(1)


@pytest.mark.parametrize(
    ("capacity", "percent"), [(None, 37.4), (30_000, 33.2), (10_000, 21.5), (3_000, 6.6)]
)
def test_hit_rates_of_the_conversation(
    requests: list[Request], capacity: int | None, percent: float
) -> None:
    assert len(requests) == 12_031
    cache, hit = PrefixCache(capacity), 0
    for request in requests:
        hit += min(cache.usable_hit(request.block_ids) * 512, request.num_prompt_tokens)
        cache.store(request.block_ids)
    total = sum(request.num_prompt_tokens for request in requests)
    assert 100 * hit / total == pytest.approx(percent, abs=0.5)
