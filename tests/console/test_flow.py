from prfaas.gateway.console.history import WINDOW_S, LinkFlow


def test_a_rate_is_bytes_delivered_over_the_window_and_not_the_last_busy_rate() -> None:
    flow = LinkFlow()
    # 100 MB in the first second, as fast as the link goes, then nothing.
    for second, counter in enumerate([0, 100_000_000] + [100_000_000] * 8):
        flow.look(float(second), counter)
        if second == 5:
            assert flow.bits_per_s == 8 * 100_000_000 / WINDOW_S
    assert flow.bits_per_s == 0
    assert flow.delivered_bytes == 100_000_000


def test_the_sum_of_rates_is_what_was_delivered() -> None:
    """`carried()` had drawn half a second as a whole one: 42 % too much."""
    flow, seen, counter = LinkFlow(), 0.0, 0
    for second in range(60):
        counter += 3_000_000 if second % 7 == 0 else 0
        flow.look(float(second), counter)
        seen += flow.bits_per_s / 8
    assert abs(seen - flow.delivered_bytes) <= 3_000_000 * 2  # what is still in the window


def test_connections_that_are_opened_anew_count_from_nothing() -> None:
    flow = LinkFlow()
    for second, counter in enumerate([500, 900, 100, 250]):
        flow.look(float(second), counter)
    assert flow.delivered_bytes == 400 + 100 + 150


def test_what_was_delivered_before_the_first_look_is_not_counted() -> None:
    flow = LinkFlow()
    flow.look(0.0, 10**12)
    assert (flow.delivered_bytes, flow.bits_per_s) == (0, 0.0)
