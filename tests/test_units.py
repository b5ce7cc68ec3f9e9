import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import ConfigError
from prfaas.units import format_size, parse_duration, parse_rate, parse_size


@pytest.mark.parametrize(
    ("text", "expected"), [("16GiB", 16 * 2**30), ("1.5 MB", 1_500_000), ("0B", 0)]
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


def test_durations_and_rates() -> None:
    assert parse_duration("250ms") == 250_000_000
    assert parse_duration("2min") == 120 * 10**9
    assert parse_rate("10Gbps") == 10**10


@pytest.mark.parametrize("text", ["", "16", "16gb", "-1GiB", "GiB", "1 GiB extra"])
def test_what_is_not_a_size_says_so(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


@given(st.integers(min_value=0, max_value=2**50))
def test_every_size_has_a_short_form(num_bytes: int) -> None:
    assert len(format_size(num_bytes)) <= 11
