"""What one of several connections may send."""

from prfaas.wire.sockets import share_of


def test_a_limit_never_becomes_none() -> None:
    assert share_of(10**9, 4) == 31_250_000
    assert share_of(8, 16) == 1
    assert share_of(0, 4) == 0
    assert share_of(800, 0) == 100
