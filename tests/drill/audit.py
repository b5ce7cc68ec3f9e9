"""Audit logs of pool node processes, and what they cost.

python -m tests.drill.audit [--seconds 20]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import secrets
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from prfaas.audit.reading import logs_of, records, verify
from prfaas.billing.report import Period, logs_in_folders, make_bill
from prfaas.core.audit.records import RecordKind

from .processes import NodeProcess, Observer

COUNTERS = {"link_bytes": "prfaas_link_bytes_total", "wire_bytes": "prfaas_link_wire_bytes_total"}
CONCURRENT = 4


async def audited(nodes: Mapping[str, NodeProcess], folder: Path) -> list[str]:
    """Stop processes at rest; return what their logs and their last counters do not share.

    Counters begin at 0 with a process, so only records since its last start are added up.
    """
    found = []
    for name, node in nodes.items():
        counted = await node.metrics()
        await node.stop()
        files = logs_of(folder)[name]
        report = verify(folder, name, files)
        found += [f"audit of {name}: {text}" for text in report.findings]
        sums = dict.fromkeys(COUNTERS, 0)
        for line in records(files):
            if line.kind == RecordKind.START:
                sums = dict.fromkeys(COUNTERS, 0)
            for field in sums:
                sums[field] += line.fields.get(field, 0)
        bill = make_bill({name: files}, Period(since=started(files))).total().amounts
        billed = {
            "link_bytes": bill.sent_bytes + bill.received_bytes,
            "wire_bytes": bill.sent_wire_bytes + bill.received_wire_bytes,
        }
        for field, metric in COUNTERS.items():
            count = counted.get(metric, 0)  # No link has had bytes since the last start.
            if sums[field] != count:
                found.append(f"audit of {name}: {field} {sums[field]}, counted {count}")
            if billed[field] != count:
                found.append(f"bill of {name}: {field} {billed[field]}, counted {count}")
    return found


def started(files: Mapping[int, Path]) -> str:
    """Time of the last start of a process."""
    starts = [line for line in records(dict(files)) if line.kind == RecordKind.START]
    return str(starts[-1].fields["at"])


def unbilled(folder: Path) -> list[str]:
    """Bytes in the records of all processes that are not in the bill of all logs.

    The records are read as plain JSON, so that nothing is shared with what the bill reads.
    """
    written = dict.fromkeys(("sent_bytes", "sent_wire_bytes", *_RECEIVED), 0)
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # The last line before a kill may be torn.
                record = json.loads(line)
                if record["kind"] == RecordKind.MOVEMENT:
                    written[f"{record['direction']}_bytes"] += record["link_bytes"]
                    written[f"{record['direction']}_wire_bytes"] += record["wire_bytes"]
    bill = make_bill(logs_in_folders([folder]), Period()).total().amounts
    return [
        f"bill: {name} {getattr(bill, name)}, in the logs {count}"
        for name, count in written.items()
        if getattr(bill, name) != count
    ]


_RECEIVED = ("received_bytes", "received_wire_bytes")


async def _load(directory: Path, seconds: float) -> None:
    """Transfers as fast as they go, and the share of the audit's CPU time."""
    from .drill import DESTINATION, SOURCE, Drill, prompt, until

    chance = random.Random(1)
    async with Drill.at(directory, 1) as drill:
        drill.proxy.read_bits_per_s = 0
        await drill.ready()
        before = {name: node.cpu_s() for name, node in drill.nodes.items()}
        ends_at, num_transfers = time.monotonic() + seconds, 0

        async def push() -> None:
            nonlocal num_transfers
            while time.monotonic() < ends_at:
                transfer = secrets.token_bytes(16)
                await drill._prefill(transfer, prompt(chance))
                observer = drill.observers[SOURCE]
                await until("a transfer ends", partial(_has_ended, observer, transfer))
                num_transfers += 1

        began = time.monotonic()
        await asyncio.gather(*(push() for _ in range(CONCURRENT)))
        passed_s = time.monotonic() - began
        print("| | source | destination |\n|---|---|---|")
        rows = {name: await node.metrics() for name, node in drill.nodes.items()}
        cpu = {name: node.cpu_s() - before[name] for name, node in drill.nodes.items()}
        ends = (SOURCE, DESTINATION)
        shares = {n: rows[n]["prfaas_pool_audit_cpu_seconds_total"] / cpu[n] for n in ends}
        rates = {n: rows[n][COUNTERS["link_bytes"]] / passed_s / 1e6 for n in ends}
        for title, values in (
            (
                "link, MB/s",
                [f"{rates[n]:.0f}" for n in ends],
            ),
            ("CPU of the process, s", [f"{cpu[n]:.2f}" for n in ends]),
            ("share of the audit", [f"{shares[n]:.2%}" for n in ends]),
            ("lines", [f"{rows[n]['prfaas_pool_audit_last_line']:.0f}" for n in ends]),
            ("write calls", [f"{rows[n]['prfaas_pool_audit_writes_total']:.0f}" for n in ends]),
        ):
            print(f"| {title} | {' | '.join(values)} |")
        print(f"\n{num_transfers} transfers in {passed_s:.1f} s")


def _has_ended(observer: Observer, transfer: bytes) -> bool:
    return bool(observer.states(transfer))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20)
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(_load(Path(scratch), parser.parse_args().seconds))


if __name__ == "__main__":
    main()
