"""The instance that is selected for a prefill is the one that a scan of all instances finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.dispatch.instances import PrefillInstances
from prfaas.core.dispatch.scoring import MIXED_WEIGHTS, PREFILL_WEIGHTS, Candidate, Weights, pick
from prfaas.core.dispatch.types import Arrival, Member
from prfaas.units import NS_PER_S

NOW = 10 * NS_PER_S
NAMES = [f"i{number:02}" for number in range(12)]
INSTANCES = st.lists(
    st.tuples(
        st.sampled_from("xyz"),  # pool
        st.sampled_from([b"a", b"b", None]),  # layout
        st.sampled_from([500, 2000]),  # longest prompt
        st.integers(0, 5),  # requests that it decodes
        st.integers(0, 3),  # seconds of work
        st.booleans(),  # whether its load is known
        st.booleans(),  # whether it has no cores of its own
    ),
    max_size=12,
)


@given(
    rows=INSTANCES,
    hits=st.dictionaries(st.sampled_from(["x", "y", "z", *NAMES]), st.integers(0, 1000)),
    avoid=st.sampled_from(["", "i00", "i03"]),
    weights=st.sampled_from([Weights(), PREFILL_WEIGHTS, MIXED_WEIGHTS]),
)
def test_the_choice_is_that_of_a_scan_of_all_instances(
    rows: list[tuple[str, bytes | None, int, int, int, bool, bool]],
    hits: dict[str, int],
    avoid: str,
    weights: Weights,
) -> None:
    names = NAMES[: len(rows)]
    device = {name: hits.get(name, 0) for name in names}
    members = [
        Member(name, row[0], frozenset({"p0"} if row[6] else ()))
        for name, row in zip(names, rows, strict=True)
    ]
    stage = PrefillInstances(members, NS_PER_S, weights)
    for name, (_, layout, longest, num_open, work_s, known, _) in zip(names, rows, strict=True):
        instance = stage.instances[name]
        instance.layout_id, instance.num_tokens_max = layout, longest
        for _ in range(num_open):
            stage.enter(name)
        stage.book.report(name, NOW if known else 1, 0)
        if work_s:
            stage.book.dispatch(name, 1, NOW, work_s * NS_PER_S)
    everybody = [
        Candidate(
            name,
            name != avoid,
            wait_ns,
            max(hits.get(stage.instances[name].pool, 0), device[name]),
            0,
            rows[int(name[1:])][3],
            stage.instances[name].num_tokens_max,
            stage.instances[name].layout_id == b"a",
            device_tokens=device[name],
            adds_cores=not rows[int(name[1:])][6],
        )
        for name, wait_ns in stage.book.in_order(NOW)
    ]
    most = max(hits.values(), default=0)
    wanted = pick(
        everybody,
        1000,
        hit_tokens_max=most,
        weights=weights,
        device_tokens_max=max(device.values(), default=0),
    )
    arrival = Arrival(1, 1000, 1000, hits, avoid=avoid)
    found = stage.pick(arrival, NOW, lambda i: (i.layout_id == b"a", True, not i.within))
    assert (found.candidate, found.obstacle) == (wanted.candidate, wanted.obstacle)
