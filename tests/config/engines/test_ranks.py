"""Data-parallel ranks behind one URL: a table of the file becomes an engine a rank."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from prfaas.config.clusters import ClusterTable, EngineTable
from prfaas.membership.entries import engine_member, engine_table

URL = "http://127.0.0.1:8100"


def cluster(**engines: Any) -> ClusterTable:
    tables = {name: {"pool": "p", **table} for name, table in engines.items()}
    return ClusterTable.model_validate({"role": "pd", "pools": {"p": {}}, "engines": tables})


def test_each_rank_is_an_engine_with_the_ports_of_its_events() -> None:
    events = {"kv_events": "tcp://[::1]:5557", "kv_events_replay": "tcp://[::1]:5600"}
    made = cluster(d={"url": URL, "ranks": 3, "sequences_max": 9, **events}, e={"url": URL})
    assert list(made.engines) == ["d-0", "d-1", "d-2", "e"]
    assert made.engines["d-2"] == EngineTable(
        pool="p",
        url=URL,
        rank=2,
        sequences_max=9,
        kv_events="tcp://[::1]:5559",
        kv_events_replay="tcp://[::1]:5602",
    )
    assert made.engines["e"].rank is None


def test_ranks_on_several_hosts_are_listed_one_by_one() -> None:
    made = cluster(a={"url": URL, "rank": 0}, b={"url": URL, "rank": 1, "kv_events": "ipc:///e"})
    assert [table.rank for table in made.engines.values()] == [0, 1]


@pytest.mark.parametrize(
    ("engines", "words"),
    [
        ({"d": {"ranks": 2}}, "data-parallel ranks need the `url` that they share"),
        ({"d": {"rank": 0}}, "data-parallel ranks need the `url` that they share"),
        ({"d": {"url": URL, "ranks": 2, "rank": 1}}, "give `ranks` for all of them, or `rank`"),
        ({"d": {"url": URL, "ranks": 257}}, "257 ranks are more than 256"),
        ({"d": {"url": URL, "ranks": 0}}, "greater than or equal to 1"),
        ({"d": {"url": URL, "ranks": "2"}}, "valid integer"),
        ({"d": {"url": URL, "ranks": 2}, "d-1": {"url": URL}}, "has the name of another engine"),
        (
            {"d": {"url": URL, "ranks": 2, "kv_events": "ipc:///run/e"}},
            "kv_events is 'ipc:///run/e', where vLLM publishes for one rank alone",
        ),
        (
            {"d": {"url": URL, "ranks": 2, "kv_events": "tcp://127.0.0.1:65535"}},
            "has no port for rank 1",
        ),
        ({"d": {"url": URL, "rank": 256}}, "less than 256"),
    ],
)
def test_ranks_that_make_no_sense_are_refused_in_words(engines: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        cluster(**engines)


def test_a_table_alone_has_one_rank() -> None:
    with pytest.raises(ValidationError, match="give `rank`"):
        EngineTable(pool="p", url=URL, ranks=2)


@pytest.mark.parametrize("rank", [None, 0, 3])
def test_a_member_keeps_its_rank(rank: int | None) -> None:
    table = EngineTable(pool="p", url=URL, rank=rank)
    assert engine_table(engine_member("d", "pd", URL, table)).rank == rank
