"""The rules of tickets: what one allows, and that it is used once."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.transfer.tickets import (
    CLOCK_SKEW_NS,
    LIFETIME_MAX_NS,
    Ticket,
    TicketRefusal,
    TicketRefusedError,
    UsedTickets,
    check_ticket,
)

NOW = 1_800_000_000 * 10**9
TICKET = Ticket(
    b"t" * 16, "tenant", b"L" * 32, "prfaas-pool", "pd-pool", b"n" * 32, 1000, NOW + 10**9
)


def check(ticket: Ticket, now_ns: int = NOW) -> None:
    check_ticket(
        ticket,
        transfer_id=b"t" * 16,
        source="prfaas-pool",
        destination="pd-pool",
        now_ns=now_ns,
    )


def test_a_ticket_for_this_transfer_is_good_until_it_ends_and_clocks_may_differ() -> None:
    check(TICKET)
    check(TICKET, TICKET.expires_at_ns + CLOCK_SKEW_NS)
    check(replace(TICKET, expires_at_ns=NOW + LIFETIME_MAX_NS + CLOCK_SKEW_NS))


@pytest.mark.parametrize(
    ("ticket", "reason"),
    [
        (replace(TICKET, transfer_id=b"u" * 16), TicketRefusal.FOREIGN),
        (replace(TICKET, source="another-pool"), TicketRefusal.FOREIGN),
        (replace(TICKET, destination="another-pool"), TicketRefusal.FOREIGN),
        (replace(TICKET, source="pd-pool", destination="prfaas-pool"), TicketRefusal.FOREIGN),
        (replace(TICKET, expires_at_ns=NOW - CLOCK_SKEW_NS - 1), TicketRefusal.EXPIRED),
        (replace(TICKET, expires_at_ns=0), TicketRefusal.EXPIRED),
        (replace(TICKET, expires_at_ns=NOW + LIFETIME_MAX_NS + 2 * CLOCK_SKEW_NS), "too_long"),
    ],
)
def test_what_it_does_not_allow_is_refused(ticket: Ticket, reason: str) -> None:
    with pytest.raises(TicketRefusedError) as caught:
        check(ticket)
    assert caught.value.reason == reason


def test_a_ticket_is_used_once_for_as_long_as_it_is_valid() -> None:
    used = UsedTickets()
    used.use(TICKET, NOW)
    with pytest.raises(TicketRefusedError) as caught:
        used.use(TICKET, TICKET.expires_at_ns + CLOCK_SKEW_NS)
    assert caught.value.reason is TicketRefusal.REPLAYED


def test_a_full_book_refuses_new_tickets_until_old_ones_end() -> None:
    used = UsedTickets(used_max=1)
    used.use(TICKET, NOW)
    other = replace(TICKET, transfer_id=b"u" * 16)
    with pytest.raises(TicketRefusedError) as caught:
        used.use(other, NOW)
    assert caught.value.reason is TicketRefusal.BUSY
    used.use(other, TICKET.expires_at_ns + CLOCK_SKEW_NS + 1)
    assert len(used) == 1


@given(
    uses=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 200), st.integers(0, 30))),
)
def test_no_valid_ticket_is_ever_used_twice(uses: list[tuple[int, int, int]]) -> None:
    """Ids, lifetimes and steps of time in seconds, against a plain list of what happened."""
    used = UsedTickets()
    now = NOW
    ends: dict[bytes, int] = {}
    for number, lifetime, step in uses:
        now += step * 10**9
        ticket = replace(TICKET, transfer_id=bytes([number] * 16), expires_at_ns=now + lifetime)
        is_used = ends.get(ticket.transfer_id, -1) >= now
        with pytest.raises(TicketRefusedError) if is_used else nullcontext():
            used.use(ticket, now)
        if not is_used:
            ends[ticket.transfer_id] = ticket.expires_at_ns + CLOCK_SKEW_NS
        assert len(used) == sum(end >= now for end in ends.values())
