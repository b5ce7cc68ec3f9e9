"""Token ids as JSON."""

from __future__ import annotations

import json
from array import array

from hypothesis import given
from hypothesis import strategies as st

from prfaas.gateway.http.json_codec import to_json

EDGES = [edge + near for edge in (0, *(10**n for n in range(1, 10))) for near in (-1, 0, 1)]


@given(st.lists(st.integers(0, 2**32 - 1) | st.sampled_from(EDGES[1:]) | st.integers(0, 2**20)))
def test_any_ids(ids: list[int]) -> None:
    assert json.loads(to_json(array("I", ids))) == ids


def test_every_id() -> None:
    for bits in (3, 17, 18, 19, 20, 21):
        ids = range(1 << bits)
        assert json.loads(to_json(array("I", ids))) == list(ids)


def test_ids_within_a_body() -> None:
    ids = [7, 123456, 0]
    body = {"prompt": array("I", ids), "n": {"ids": array("I", ids[:1])}, "none": array("I")}
    expected = {"prompt": ids, "n": {"ids": ids[:1]}, "none": []}
    assert json.loads(to_json(body)) == expected
