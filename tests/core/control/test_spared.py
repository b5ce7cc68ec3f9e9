"""Work spared at the PD cluster counts once, at any time of reading."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.control.threshold_loop import Spared
from prfaas.units import NS_PER_S

LOOKS = st.lists(st.tuples(st.integers(1, 10**11), st.integers(0, 10**12)), max_size=50)


@given(looks=LOOKS)
def test_all_that_was_spared_is_counted_once(looks: list[tuple[int, int]]) -> None:
    spared, now_ns, total_ns, counted_ns = Spared(), 0, 0, 0.0
    for elapsed_ns, more_ns in looks:
        now_ns, total_ns = now_ns + elapsed_ns, total_ns + more_ns
        found = spared.look(total_ns, now_ns)
        assert found >= 0
        counted_ns += found * elapsed_ns
    assert counted_ns == pytest.approx(total_ns)


def test_two_looks_at_once_count_nothing_twice() -> None:
    spared = Spared()
    assert spared.look(NS_PER_S, 2 * NS_PER_S) == 0.5
    assert spared.look(NS_PER_S, 2 * NS_PER_S) == 0.0
