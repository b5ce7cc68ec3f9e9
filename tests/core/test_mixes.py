"""What requests are like lately."""

from __future__ import annotations

from prfaas.core.mixes import NUM_MAX, NUM_MIN, Mixes

WINDOW_NS = 800


def test_too_few_requests_say_nothing() -> None:
    mixes = Mixes(WINDOW_NS)
    for i in range(NUM_MIN - 1):
        mixes.ended(i, 10, 20, 30)
    assert mixes.look(NUM_MIN) is None


def test_a_mix_describes_the_requests_of_its_window() -> None:
    mixes = Mixes(WINDOW_NS)
    for _ in range(2 * NUM_MIN):
        mixes.ended(0, 1, 1, 1)
    for i in range(NUM_MIN):
        mixes.ended(WINDOW_NS, 100 + i, 1000, 50 if i % 2 else 150)
    found = mixes.look(WINDOW_NS + 1)
    assert found is not None
    assert found.new_tokens == tuple(100 + i for i in range(NUM_MIN))
    assert (found.mean_prompt_tokens, found.mean_output_tokens) == (1000, 100)


def test_a_mix_is_looked_at_anew_now_and_then_and_stays_small() -> None:
    mixes = Mixes(WINDOW_NS)
    for _ in range(NUM_MIN):
        mixes.ended(0, 1, 1, 1)
    first = mixes.look(0)
    for _ in range(2 * NUM_MAX):
        mixes.ended(1, 2, 2, 2)
    assert mixes.look(WINDOW_NS // 8 - 1) is first
    second = mixes.look(WINDOW_NS // 8)
    assert second is not None
    assert second.new_tokens == (2,) * NUM_MAX
