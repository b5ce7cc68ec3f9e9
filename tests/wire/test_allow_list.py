"""Peers that are admitted by name, or by the site in their identity."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from prfaas.core.transfer.tickets import Ticket, TicketRefusedError
from prfaas.errors import ConfigError
from prfaas.wire.allow_list import admitted, check_entries, site_uri
from prfaas.wire.certificates import reissue
from prfaas.wire.identity import make_authority, make_identity
from prfaas.wire.tickets import TicketOpener, TicketSigner

URI = "spiffe://prfaas/site/pd/pool/pd-a"


@pytest.mark.parametrize(
    "entry", ["pd-a", "site/pd/pool/pd-a", "site/pd/pool/*", "site/pd/*/pd-*", "site/p*/pool/*"]
)
def test_a_name_or_a_site_admits(entry: str) -> None:
    assert admitted(["pd-a"], [URI], {entry}) == "pd-a"


@pytest.mark.parametrize(
    ("names", "uris"),
    [
        (["pd-a"], []),
        (["other"], [URI]),
        (["pd-a"], ["spiffe://prfaas/site/far/pool/pd-a"]),
        (["pd-a"], ["spiffe://prfaas/site/pd/gateway/pd-a"]),
        (["pd-a"], ["spiffe://elsewhere/site/pd/pool/pd-a"]),
        (["pd-a"], ["spiffe://prfaas/site/pd/pool/x/pd-a"]),
        (["pd-a"], ["x-spiffe://prfaas/site/pd/pool/pd-a"]),
        (["site/pd/pool/*x"], []),
    ],
)
def test_another_site_kind_or_name_is_not_admitted(names: list[str], uris: list[str]) -> None:
    assert admitted(names, uris, {"site/pd/pool/*"}) is None


@pytest.mark.parametrize(
    "entry", ["site/pd/pool", "site/*pd/pool/*", "site/pd/pool/a/b", "pd/pool/*", "site/PD/pool/*"]
)
def test_a_pattern_of_another_form_is_refused_in_words(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"as in site/pd/pool/\*"):
        check_entries(["pd-a", "site/pd/pool/*", entry])


@pytest.mark.parametrize("site", ["pd", "pd/pool/x", "pd/*", "PD/pool", ""])
def test_a_site_of_another_form_is_refused_in_words(site: str) -> None:
    with pytest.raises(ConfigError, match="as in pd/pool"):
        site_uri(site, "pd-a")


def test_the_tickets_of_all_gateways_of_a_site_are_valid(tmp_path: Path) -> None:
    make_authority(tmp_path)
    for name, site in (("gateway-1", "pd/gateway"), ("gateway-2", "far/gateway")):
        make_identity(tmp_path, name, site=site)
    # Its site survives a renewal.
    ours = reissue(tmp_path, "gateway-1")
    theirs = reissue(tmp_path, "gateway-2")
    opener = TicketOpener(tmp_path / "ca.pem", frozenset({"site/pd/gateway/*"}))
    now_ns = time.time_ns() + 60 * 10**9
    ticket = Ticket(
        b"t" * 16, "ab" * 8, bytes(32), "far-pool", "pd-pool", b"n" * 32, 1, now_ns, 2.5, 10**9, ""
    )
    assert opener.open(TicketSigner(ours).seal(ticket), now_ns).destination == "pd-pool"
    with pytest.raises(TicketRefusedError, match="gateway-2"):
        opener.open(TicketSigner(theirs).seal(ticket), now_ns)
