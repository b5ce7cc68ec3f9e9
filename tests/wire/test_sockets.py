"""Share of one of several connections."""

import socket

from prfaas.wire.sockets import prepare, restart_control, share_of


def test_a_limit_never_becomes_none() -> None:
    assert share_of(10**9, 4) == 31_250_000
    assert share_of(8, 16) == 1
    assert share_of(0, 4) == 0
    assert share_of(800, 0) == 100


def test_a_connection_keeps_its_congestion_control_when_that_starts_anew() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket() as caller,
    ):
        control = prepare(caller)
        caller.connect(server.getsockname())
        restart_control(caller)
        assert caller.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(
            control.encode()
        )
