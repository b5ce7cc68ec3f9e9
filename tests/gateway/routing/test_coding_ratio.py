"""Coding of links, as routes and operators see it."""

import msgspec
import pytest

from prfaas.cli.operate.ctl_views import status_lines
from prfaas.gateway.routing.dispatch_driver import link_report
from prfaas.wire.messages.gateway import LinkTelemetry

FIELDS = [
    "age_ns",
    "goodput_bits_per_s",
    "rtt_ns",
    "queued_bytes",
    "in_flight_bytes",
    "retransmits",
    "delivery_bits_per_s",
    "window_segments",
    "num_connections",
]


def telemetry(**fields: float) -> LinkTelemetry:
    return msgspec.convert(dict.fromkeys(FIELDS, 0) | fields, LinkTelemetry)


def test_a_coded_link_carries_more_bytes_of_blocks_than_it_transmits() -> None:
    seen = telemetry(goodput_bits_per_s=1_000, budget_bits_per_s=2_000, coding_ratio=1.5)

    report = link_report(seen, now_ns=7)

    assert report.goodput_bits_per_s == 1_500
    assert report.budget_bits_per_s == 3_000


def test_an_older_pool_node_sends_raw() -> None:
    assert link_report(telemetry(goodput_bits_per_s=1_000), now_ns=7).goodput_bits_per_s == 1_000


LINK = {
    "source": "prfaas-pool",
    "destination": "pd-pool",
    "is_up": True,
    "offload_threshold": 1000,
}
FOUND = {
    "policy": "threshold",
    "loops": {"frozen": False},
    "clusters": [],
    "engines": [],
    "pools": [],
}


def test_ctl_shows_what_coding_does() -> None:
    (coded,) = [
        x for x in status_lines(FOUND | {"links": [LINK | {"coding_ratio": 1.329}]}) if "link" in x
    ]
    (raw,) = [x for x in status_lines(FOUND | {"links": [LINK]}) if "link" in x]

    assert coded.endswith("coding 1.33x")
    assert "coding" not in raw


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ({}, ""),
        ({"encryption": "unknown"}, ""),
        ({"encryption": "sealed"}, "sealed"),
        ({"encryption": "tls"}, "tls"),
        ({"encryption": "network"}, "NOT ENCRYPTED (network)"),
    ],
)
def test_ctl_shows_how_the_blocks_of_a_link_are_protected(told: dict[str, str], shown: str) -> None:
    link = LINK | told
    (line,) = [each for each in status_lines(FOUND | {"links": [link]}) if "link" in each]
    assert line.endswith(f"1,000 tokens  {shown}" if shown else "1,000 tokens")
