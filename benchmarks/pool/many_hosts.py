"""Pool nodes of many hosts at two sites, each in a process of its own, over an emulated WAN.

    python benchmarks/pool/many_hosts.py                    # 20 + 20 hosts, 20 ms; needs root
    python benchmarks/pool/many_hosts.py --hosts 10 --connections 16

Every host of the first site has a link to every host of the second, as `prfaas up` makes them. It
prints how many links are up, moves a transfer over each, stops one node for 20 s, and prints when
all links are up again.
"""

import argparse
import asyncio
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

from prfaas.wire.identity import make_authority, make_identity
from tests.lab.wan import Side, Wan
from tests.pool.sites import PROMPT, Engine
from tests.ports import free_port

STOPPED_S, LIMIT_S = 20.0, 900.0
POLL_S = 1.0
UP = re.compile(r"^prfaas_link_up\{[^}]*\} 1\.0$", re.M)
OPEN = re.compile(r"^prfaas_link_connections\{[^}]*\} ([0-9.]+)$", re.M)
REFUSED = re.compile(r'^prfaas_connections_refused_total\{port="link"\} ([0-9.e+]+)$', re.M)


class Host:
    """A pool node, and an engine of it in this process."""

    def __init__(self, name: str, side: Side, place: Path) -> None:
        self.name, self.side, self.place = name, side, place
        self.port, self.admin = free_port(), free_port()
        self.process: asyncio.subprocess.Process | None = None
        self.engine: Engine | None = None

    @property
    def socket(self) -> Path:
        return self.place / f"{self.name}.sock"

    async def start(self, wan: Wan, peers: "list[Host]", sources: "list[Host]", more: int) -> None:
        command = [sys.executable, "-m", "prfaas", "pool", "--name", self.name, "--memory", "8MiB"]
        command += ["--listen", f"0.0.0.0:{self.port}", "--admin", f"0.0.0.0:{self.admin}"]
        command += ["--socket", str(self.socket), "--gateway", "gateway", "--link-codec", "raw"]
        command += ["--identities", str(self.place)]
        for peer in peers:
            command += ["--peer", f"{peer.name}={wan.address(peer.side)}:{peer.port}"]
            command += ["--link-connections", f"{peer.name}={more}"] if more else []
        for source in sources:
            command += ["--source", source.name]
        log = (self.place / f"{self.name}.log").open("wb")
        self.process = await wan.run(self.side, command, stdout=log, stderr=log)


READ = """
import sys, urllib.request
for url in sys.argv[1:]:
    try:
        print(urllib.request.urlopen(url, timeout=5).read().decode())
    except OSError:
        pass
"""


async def metrics(wan: Wan, hosts: list[Host]) -> str:
    """The metrics of the nodes of a site, read within its namespace; of those that answer."""
    urls = [f"http://127.0.0.1:{host.admin}/metrics" for host in hosts]
    reader = await wan.run(hosts[0].side, [sys.executable, "-c", READ, *urls], stdout=-1)
    text, _ = await reader.communicate()
    return str(text.decode())


async def seen(wan: Wan, hosts: list[Host], targets: list[Host]) -> tuple[int, int, int]:
    """Links to the targets that are up, their data connections, and refused connections."""
    sent, received = await metrics(wan, hosts), await metrics(wan, targets)
    refused = sum(int(float(count)) for count in REFUSED.findall(received))
    num_open = sum(int(float(count)) for count in OPEN.findall(sent))
    return len(UP.findall(sent)), num_open, refused


async def until_up(wan: Wan, hosts: list[Host], targets: list[Host], what: str) -> None:
    """Print the links that are up until all are, or the time is over."""
    began, wanted = time.monotonic(), len(hosts) * len(targets)
    while True:
        up, num_open, refused = await seen(wan, hosts, targets)
        took = time.monotonic() - began
        print(
            f"{what}: {took:.0f} s, {up} of {wanted} links up, {num_open} data connections, "
            f"{refused} refused",
            flush=True,
        )
        if up >= wanted or took > LIMIT_S:
            return
        await asyncio.sleep(POLL_S)


def pushed(place: Path, source: Host, target: Host) -> bytes:
    """Have an engine begin a transfer to another host's pool."""
    assert source.engine is not None
    return source.engine.push(target.name, source=source.name)


async def transfers(wan: Wan, sources: list[Host], targets: list[Host]) -> None:
    """Move the blocks of a prompt over each link."""
    began = time.monotonic()
    for source in sources:
        assert source.engine is not None
        for target in targets:
            transfer = pushed(source.place, source, target)
            await source.engine.store(PROMPT, transfer)
            source.engine.push_done(transfer)
    name = 'prfaas_transfers_total{direction="received",state="committed"}'
    wanted, found = len(sources) * len(targets), 0
    while found < wanted and time.monotonic() - began < LIMIT_S:
        lines = (await metrics(wan, targets)).splitlines()
        found = sum(int(float(line.split()[-1])) for line in lines if line.startswith(name))
    print(f"transfers: {found} of {wanted} committed after {time.monotonic() - began:.0f} s")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=20, help="of each site")
    parser.add_argument("--rtt-ms", type=float, default=20.0)
    parser.add_argument("--connections", type=int, default=0, help="of a link; 0 adapts")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        make_authority(place)
        make_identity(place, "gateway")
        remote = [Host(f"prfaas-{n}", "a", place) for n in range(asked.hosts)]
        local = [Host(f"pd-{n}", "b", place) for n in range(asked.hosts)]
        for host in (*remote, *local):
            make_identity(place, host.name)
        async with Wan(rtt_ms=asked.rtt_ms) as wan:
            try:
                await run(wan, remote, local, asked.connections)
            finally:
                for host in (*remote, *local):
                    if host.engine is not None:
                        await asyncio.to_thread(host.engine.close)


async def run(wan: Wan, remote: list[Host], local: list[Host], connections: int) -> None:
    for host in local:
        # Hosts of the PD site pull from each other as well.
        others = [other for other in local if other is not host]
        await host.start(wan, others, [*remote, *others], 0)
    for host in remote:
        await host.start(wan, local, [], connections)
    await until_up(wan, remote, local, "start")
    for host in remote + local:
        host.engine = Engine(f"engine-of-{host.name}", host.socket, host.place)
        await host.engine.connected()
    await transfers(wan, remote, local)
    stopped = local[0].process
    assert stopped is not None
    stopped.send_signal(signal.SIGSTOP)
    await asyncio.sleep(STOPPED_S)
    up, *_ = await seen(wan, remote, local[1:])
    print(f"one node stopped for {STOPPED_S:.0f} s: {up} links up", flush=True)
    stopped.send_signal(signal.SIGCONT)
    await until_up(wan, remote, local, "after it")


if __name__ == "__main__":
    asyncio.run(main())
