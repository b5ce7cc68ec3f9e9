"""`prfaas link test` over an emulated WAN, beside what is known of that WAN and beside iperf3."""

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from prfaas.wire.identity import make_authority, make_identity
from tests.lab.wan import Wan, why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "can run"),
    pytest.mark.timeout(60),
]
RATE, RTT_MS = 100_000_000, 30
PRFAAS = [sys.executable, "-m", "prfaas", "link"]


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("identities")
    make_authority(directory)
    for name in ("prfaas-pool", "pd-pool"):
        make_identity(directory, name)
    return directory


async def serving(wan: Wan, identities: Path) -> None:
    args = ["serve", "pd-pool", "--source", "prfaas-pool", "--identities", str(identities)]
    listen = ["--listen", f"{wan.address('b')}:7100"]
    process = await wan.run("b", [*PRFAAS, *args, *listen], stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert b"takes link tests" in await process.stdout.readline()


async def report_of(wan: Wan, identities: Path, *args: str) -> dict[str, Any]:
    there = ["--to", f"{wan.address('b')}:7100", "--identities", str(identities)]
    process = await wan.run(
        "a",
        [*PRFAAS, "test", "prfaas-pool", "pd-pool", *there, "--json", *args],
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    report: dict[str, Any] = json.loads(output)
    return report


async def iperf_bits_per_s(wan: Wan, control: str) -> float:
    server = await wan.run(
        "b", ["iperf3", "-s", "-1", "--forceflush"], stdout=asyncio.subprocess.PIPE
    )
    assert server.stdout is not None
    while b"listening" not in await server.stdout.readline():
        pass
    args = ["iperf3", "-c", wan.address("b"), "-C", control, "-P", "4", "-t", "3", "-O", "1", "-J"]
    client = await wan.run("a", args, stdout=asyncio.subprocess.PIPE)
    output, _ = await client.communicate()
    await server.wait()
    rate: float = json.loads(output)["end"]["sum_received"]["bits_per_second"]
    return rate


async def test_rate_and_round_trip_are_those_of_the_path(identities: Path) -> None:
    async with Wan(rtt_ms=RTT_MS, rate_bits_per_s=RATE) as wan:
        await serving(wan, identities)
        report = await report_of(wan, identities, "--connections", "1,4", "--seconds", "2")
        probes = report["probes"]
        assert [probe["connections"] for probe in probes] == [1, 4]
        for probe in probes:
            # Bytes behind a hole count when it is filled: a window's worth may fall into the time.
            assert 0.6 * RATE < probe["goodput_bits_per_s"] < 1.05 * RATE
            assert 0.9 * RTT_MS < probe["rtt_ns"] / 1e6 < 1.5 * RTT_MS
            assert probe["loaded_rtt_ns"] >= probe["rtt_ns"]
        assert report["best_connections"] in (1, 4)
        assert 0.6 * RATE < report["best_budget_bits_per_s"] < 1.05 * RATE
        if shutil.which("iperf3"):
            other = await iperf_bits_per_s(wan, report["congestion_control"])
            assert probes[1]["goodput_bits_per_s"] > 0.75 * other


async def test_a_paced_test_leaves_the_queue_empty_and_sees_the_loss(identities: Path) -> None:
    async with Wan(rtt_ms=RTT_MS, rate_bits_per_s=RATE, loss=0.02) as wan:
        await serving(wan, identities)
        options = ["--connections", "4", "--seconds", "3", "--budget", "50Mbps"]
        [probe] = (await report_of(wan, identities, *options))["probes"]
        assert probe["goodput_bits_per_s"] < 52e6
        assert probe["segments"] > 3000
        assert 0.01 < probe["retransmits"] / probe["segments"] < 0.04
        there = (await wan.counters()).there
        assert there.overflowed < 0.01 * there.sent
