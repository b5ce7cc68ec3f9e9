"""The list of requests: filters, pages that hold still, figures over time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from prfaas.console.request_list import QUERIES_MAX, ROWS_MAX, RequestFilter, RequestPages
from prfaas.console.request_series import BUCKETS_MAX, RequestSeries, itl_ns, link_shares, step_of
from prfaas.core.request.actions import FellBack
from prfaas.core.request.events import Outcome
from prfaas.errors import RequestError
from prfaas.gateway.console.history import History, HistorySample, LinkSample
from prfaas.gateway.telemetry.metrics import Totals
from prfaas.gateway.telemetry.request_records import (
    RECORDS_MAX,
    STEPS_MAX,
    WHOLE_MAX,
    Records,
    RequestRecord,
    course_of,
)
from prfaas.units import NS_PER_MS, NS_PER_S
from tests.gateway.conftest import World, running
from tests.gateway.prompts import LONG
from tests.gateway.scripted_engine import hang
from tests.otlp import Collector

record_of = partial(RequestRecord, api="chat", tenant="t")


async def get(world: World, **query: object) -> Any:
    async with world.http.get(f"{world.url}/console/api/requests?{urlencode(query)}") as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json()


async def ask(world: World, request_id: str, prompt: str = "short", **headers: str) -> int:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 3, "stream": True}
    found = {"X-Request-Id": request_id, **headers}
    async with world.http.post(f"{world.url}/v1/completions", json=body, headers=found) as reply:
        await reply.read()
        return reply.status


def ids(page: Any) -> list[str]:
    return [row["request_id"] for row in page["requests"]]


async def test_pages_hold_still_while_requests_come(world: World) -> None:
    for number in range(5):
        await ask(world, f"old-{number}")
    page = await get(world, limit=2)
    assert ids(page) == ["old-4", "old-3"]
    assert (page["newest"], page["num_found"], page["num_kept"]) == (5, 5, 5)
    await ask(world, "new-0")
    further = await get(world, limit=2, before=page["requests"][-1]["number"])
    assert ids(further) == ["old-2", "old-1"]
    assert further["facets"] is None
    newer = await get(world, after=page["newest"], limit=1)
    assert (ids(newer), newer["num_found"]) == (["new-0"], 1)
    assert ids(await get(world, numbers="2,4,77")) == ["old-3", "old-1"]


async def test_each_filter_takes_what_it_names(world: World) -> None:
    await ask(world, "short-0")
    await ask(world, "long-0", LONG)
    world.prefill.script = broken
    await ask(world, "long-1", LONG + "!")
    page = await get(world)
    assert page["facets"]["path"] == {"remote": 2, "local": 1}
    assert page["facets"]["course"] == {"fell back": 2}  # no block comes
    for query, found in (
        ({"path": "local"}, ["short-0"]),
        ({"path": "remote"}, ["long-1", "long-0"]),
        ({"course": "fell back"}, ["long-1", "long-0"]),
        ({"reason": "status_5xx"}, ["long-1"]),
        ({"engine": "prefill", "course": ""}, ["long-1", "long-0"]),
        ({"engine": "nobody"}, []),
        ({"id": "long"}, ["long-1", "long-0"]),
        ({"tenant": "default", "outcome": "finished", "id": "short"}, ["short-0"]),
        ({"since": time.time() + 60}, []),
        ({"until": time.time() + 60, "path": "local"}, ["short-0"]),
        ({"ttft_min": 3_600_000}, []),
        ({"ttft_min": 0, "e2e_min": 0}, ["long-1", "long-0", "short-0"]),
    ):
        assert ids(await get(world, **query)) == found, query
    [row] = (await get(world, reason="status_5xx"))["requests"]
    assert row["fallbacks"][0]["stage"] == "prefill"
    assert 0 < row["fallbacks"][0]["at_ms"] <= row["e2e_ms"]


async def broken(engine: Any, request: Any, body: Any) -> Any:
    from aiohttp import web

    return web.Response(status=500, text="no")


async def test_a_request_that_runs_is_listed_and_looked_up_again(world: World) -> None:
    world.decode.script = hang
    asking = asyncio.create_task(ask(world, "runs"))
    while not (page := await get(world))["requests"] or not world.decode.calls:  # noqa: ASYNC110
        await asyncio.sleep(0)
    [row] = page["requests"]
    assert (row["outcome"], row["e2e_ms"]) == ("running", None)
    asking.cancel()
    while (await get(world, numbers=row["number"]))["requests"][0]["outcome"] == "running":  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_a_traced_request_names_its_trace(
    checkpoint: Path, identities: Path, tmp_path: Path, collector: tuple[Collector, str]
) -> None:
    page = "https://viewer.example/trace/{trace_id}"
    table = {"tracing": {"endpoint": collector[1], "page": page}}
    async with running(checkpoint, identities, tmp_path / "state", **table) as world:
        trace = "a" * 32
        await ask(world, "traced", traceparent=f"00-{trace}-{'b' * 16}-01")
        await ask(world, "not sampled".replace(" ", "-"), traceparent=f"00-{trace}-{'b' * 16}-00")
        found = {row["request_id"]: row["trace_id"] for row in (await get(world))["requests"]}
        assert found == {"traced": trace, "not-sampled": ""}
        async with world.http.get(f"{world.url}/console/api/session") as reply:
            assert (await reply.json())["trace_page"] == page


@pytest.mark.parametrize(
    "query",
    [
        {"since": "soon"},
        {"ttft_min": "nan"},
        {"e2e_min": "-1"},
        {"id": "x" * 129},
        {"limit": ROWS_MAX + 1},
        {"before": 0},
        {"numbers": "1,x"},
        {"numbers": "1," * ROWS_MAX + "1"},
    ],
)
async def test_a_wrong_query_is_refused(world: World, query: dict[str, object]) -> None:
    url = f"{world.url}/console/api/requests?{urlencode(query)}"
    async with world.http.get(url) as reply:
        assert reply.status == 400


@pytest.mark.parametrize("query", ["", "?since=5", "?since=5&until=5", "?since=-1&until=5"])
async def test_figures_need_a_time(world: World, query: str) -> None:
    async with world.http.get(f"{world.url}/console/api/requests/series{query}") as reply:
        assert reply.status == 400


async def test_figures_are_those_of_the_filtered_requests(world: World) -> None:
    since = time.time() - 1
    await ask(world, "short-0")
    await ask(world, "long-0", LONG)
    query = urlencode({"since": since, "until": since + 120, "path": "remote"})
    async with world.http.get(f"{world.url}/console/api/requests/series?{query}") as reply:
        found = await reply.json()
    assert (sum(found["num_requests"]), sum(found["num_remote"])) == (1, 1)
    assert sum(found["tokens_per_s"]) * found["step_s"] == pytest.approx(3, abs=0.01)
    assert [value for value in found["ttft_p50_ms"] if value is not None]
    assert len(found["at_unix_s"]) == len(found["queue_p90_ms"]) <= BUCKETS_MAX


async def test_lists_at_a_time_are_limited() -> None:
    records = Records()
    for _ in range(3):
        records.add(record_of("r"))
    pages = RequestPages(records, History())
    open_lists = [pages._newest_first() for _ in range(QUERIES_MAX)]
    for each in open_lists:
        assert (await anext(each))[0] == 3
    with pytest.raises(RequestError, match="8 lists of requests"):
        await anext(pages._newest_first())
    for each in open_lists:
        assert isinstance(each, AsyncGenerator)
        await each.aclose()
    assert [number async for number, _ in pages._newest_first(after=1)] == [3, 2]


def test_old_records_lose_what_is_large() -> None:
    records = Records()
    made = [record_of(f"request-{number}") for number in range(RECORDS_MAX + 10)]
    for record in made:
        record.stepped(object(), "stage", ())
        records.add(record)
    assert (len(records), records.num_added) == (RECORDS_MAX, RECORDS_MAX + 10)
    whole = [record for record in records.newest_first() if record.story]
    assert whole == made[: -WHOLE_MAX - 1 : -1]
    assert records.find("request-0") is None
    old = records.find("request-10")
    assert old is made[10]
    old.stepped(object(), "a long answer goes on", ())
    assert not old.story
    for _ in range(STEPS_MAX):
        made[-1].stepped(object(), "another", ())
    assert [stage for _, _, stage, _ in made[-1].story] == ["another"] * STEPS_MAX


@pytest.mark.parametrize(
    ("ttft_ms", "fallbacks", "course"),
    [
        (None, [], []),
        (5, [(1, "prefill", "status_5xx")], ["fell back"]),
        (5, [(1, "transfer", "late")], ["hedged"]),
        (5, [(1, "prefill", "stalled")], ["hedged"]),
        (5, [(9, "decode", "broken")], ["continued"]),
        (5, [(1, "decode", "broken")], ["retried"]),
        (None, [(9, "decode", "unreachable")], ["retried"]),
        (5, [(1, "prefill", "late"), (9, "decode", "broken")], ["hedged", "continued"]),
    ],
)
def test_what_happened_is_named(
    ttft_ms: int | None, fallbacks: list[tuple[int, str, str]], course: list[str]
) -> None:
    record = record_of("r")
    record.ttft_ns = None if ttft_ms is None else ttft_ms * NS_PER_MS
    record.fallbacks = tuple(
        (at * NS_PER_MS, FellBack(stage, reason, "")) for at, stage, reason in fallbacks
    )
    assert course_of(record) == course
    assert all(RequestFilter(course=word).takes(record) for word in course)
    assert not RequestFilter(course="refused").takes(record)
    record.rejected = "rate_limited"
    assert course_of(record) == ["refused", *course]


def ended(at: float, ttft_s: float, e2e_s: float, num_tokens: int) -> RequestRecord:
    return record_of(
        "r",
        started_unix_s=at,
        ttft_ns=round(ttft_s * NS_PER_S),
        e2e_ns=round(e2e_s * NS_PER_S),
        decided_ns=NS_PER_MS,
        num_output_tokens=num_tokens,
        outcome=Outcome.FINISHED,
    )


async def test_tokens_are_spread_over_the_time_in_which_they_were_made() -> None:
    series = RequestSeries(1000.0, 1010.0, 1.0)
    series.add(ended(1001.0, 1.5, 4.5, 30))
    found = await series.as_json()
    assert found["tokens_per_s"] == pytest.approx([0, 0, 5, 10, 10, 5, 0, 0, 0, 0])
    assert (found["ttft_p50_ms"][1], found["ttft_p50_ms"][2]) == (1500, None)
    assert found["itl_p90_ms"][1] == pytest.approx(3000 / 29, abs=0.001)
    assert found["queue_p50_ms"][1] == 1
    assert itl_ns(ended(0, 1, 2, 1)) is None


@pytest.mark.parametrize("duration_s", [1, 60, 900, 3600, 21_600, 1e6, 1e9])
def test_there_are_never_many_steps(duration_s: float) -> None:
    assert RequestSeries(17.3, 17.3 + duration_s, step_of(duration_s)).num_steps <= BUCKETS_MAX


def test_shares_are_of_the_links_that_have_a_budget() -> None:
    link = LinkSample(True, 0, 0.0, 0, 0, None, carried_bits_per_s=50, budget_bits_per_s=100)
    free = replace(link, budget_bits_per_s=0)
    samples = [
        HistorySample(at, Totals(0, 0, 0, 0, 0, {}), {"a>b": link, "b>a": free})
        for at in (10.0, 10.5, 12.0, 99.0)
    ]
    assert link_shares(samples, 10.0, 1.0, 3) == {"a>b": [0.5, None, 0.5]}


async def test_tokens_after_the_window_are_not_in_it() -> None:
    record = RequestRecord("x", "chat", "t")
    record.started_unix_s, record.ttft_ns = 1059.5, NS_PER_S // 10
    record.e2e_ns, record.num_output_tokens = 60 * NS_PER_S, 3000
    series = RequestSeries(1000.0, 1060.0, step_of(60))
    series.add(record)
    assert max((await series.as_json())["tokens_per_s"]) < 50
