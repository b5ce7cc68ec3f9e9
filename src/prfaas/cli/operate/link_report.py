"""Probes of `prfaas link test`, and the output of their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from prfaas.config.addresses import join_address
from prfaas.core.transfer.tcp_goodput import Probe, SendingHost, advise, best_of, budget_for
from prfaas.pool.net.link_probe import probe
from prfaas.wire.identity import Identity

TCP_WMEM = Path("/proc/sys/net/ipv4/tcp_wmem")


@dataclass(frozen=True, slots=True)
class LinkMeasurements:
    """Results of the measurements."""

    address: tuple[str, int]
    """Of the other end."""
    seconds: float
    """Time that each probe was measured."""
    budget_bits_per_s: int
    """Limit of all connections together; 0 is no limit."""
    host: SendingHost
    """Limits of the sending host."""
    probes: list[Probe]
    """One for each number of connections."""


async def run_probes(
    identity: Identity,
    peer: str,
    address: tuple[str, int],
    connections: Sequence[int],
    seconds: float,
    budget_bits_per_s: int,
) -> LinkMeasurements:
    """Measure with one number of connections after the other.

    Raises:
        TransferError: The other end is not there, or ended the test.
        PeerError: It is another peer.
    """
    tls, probes, control = identity.dialling().probe, [], ""
    for count in connections:
        measured, control = await probe(
            address,
            tls,
            peer,
            num_connections=count,
            seconds=seconds,
            budget_bits_per_s=budget_bits_per_s,
        )
        probes.append(measured)
    host = SendingHost(control, _send_buffer_bytes_max())
    return LinkMeasurements(address, seconds, budget_bits_per_s, host, probes)


def as_object(report: LinkMeasurements) -> dict[str, Any]:
    """The report for machines; rates in bits per second, times in nanoseconds."""
    return {
        "address": join_address(report.address),
        "seconds": report.seconds,
        "budget_bits_per_s": report.budget_bits_per_s,
        "congestion_control": report.host.congestion_control,
        "send_buffer_bytes_max": report.host.send_buffer_bytes_max,
        "probes": [
            {
                "connections": found.num_connections,
                "goodput_bits_per_s": found.goodput_bits_per_s,
                "rtt_ns": found.rtt_ns,
                "loaded_rtt_ns": found.loaded_rtt_ns,
                "segments": found.segments,
                "retransmits": found.retransmits,
            }
            for found in report.probes
        ],
        "best_connections": best_of(report.probes).num_connections,
        "best_budget_bits_per_s": budget_for(report.probes),
        "advice": advise(report.probes, report.host),
    }


def print_report(report: LinkMeasurements, a: str, b: str) -> None:
    """The report for people."""
    paced = (
        f", paced to {report.budget_bits_per_s / 1e6:g} Mbit/s" if report.budget_bits_per_s else ""
    )
    console = Console()
    console.print(
        f"{a} to {b} at {join_address(report.address)}, TLS 1.3, "
        f"{report.host.congestion_control}, {report.seconds:g} s each{paced}",
        highlight=False,
    )
    table = Table("connections", "goodput", "round trip", "under load", "sent again", box=None)
    for column in table.columns:
        column.justify = "right"
    for found in report.probes:
        table.add_row(
            str(found.num_connections),
            f"{found.goodput_bits_per_s / 1e6:,.0f} Mbit/s",
            f"{found.rtt_ns / 1e6:.1f} ms",
            f"{found.loaded_rtt_ns / 1e6:.1f} ms",
            f"{found.retransmit_ratio:.2%}",
        )
    console.print(table)
    for line in advise(report.probes, report.host):
        console.print(f"- {line}", highlight=False, markup=False)


def _send_buffer_bytes_max() -> int:
    """0 if the kernel does not report it."""
    try:
        return int(TCP_WMEM.read_text().split()[2])
    except (OSError, ValueError, IndexError):
        return 0
