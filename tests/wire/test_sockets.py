"""Share of one of several connections, and the congestion control of one."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

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


WITH_RENO = 'echo reno > /proc/sys/net/ipv4/tcp_congestion_control && exec "$0" -c "$1"'
REQUEST_SOCKET = """
import socket
from prfaas.wire.sockets import request_socket
place = socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0)
print(request_socket(place).getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16))
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs a namespace")
@pytest.mark.skipif(
    "bbr" not in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text(),
    reason="the kernel has no BBR",
)
def test_a_connection_with_requests_has_bbr_where_the_default_is_another_one() -> None:
    command = ["unshare", "--net", "sh", "-c", WITH_RENO, sys.executable, REQUEST_SOCKET]
    assert b"bbr" in subprocess.run(command, check=True, capture_output=True).stdout
