"""Recent mixes of requests."""

from __future__ import annotations

from prfaas.core.control.threshold_loop import NUM_MAX, NUM_MIN, Mixes

WINDOW_NS = 800


def seen(mixes: Mixes, count: int, at_ns: int, new: int, prompt: int, output: int) -> None:
    for _ in range(count):
        mixes.came(at_ns, new, prompt)
        mixes.ended(at_ns, output)


def test_too_few_requests_say_nothing() -> None:
    mixes = Mixes(WINDOW_NS)
    seen(mixes, NUM_MIN - 1, 0, 10, 20, 30)
    mixes.came(0, 10, 20)
    assert mixes.look(0) is None
    mixes.ended(0, 30)
    assert mixes.look(WINDOW_NS // 8) is not None


def test_a_mix_describes_what_came_and_what_ended_in_its_window() -> None:
    mixes = Mixes(WINDOW_NS)
    seen(mixes, 2 * NUM_MIN, 0, 1, 1, 1)
    seen(mixes, NUM_MIN, WINDOW_NS, 100, 1000, 50)
    seen(mixes, NUM_MIN, WINDOW_NS, 300, 2000, 150)
    # Those that are long have come, and have not ended.
    for _ in range(2 * NUM_MIN):
        mixes.came(WINDOW_NS, 900, 900)
    found = mixes.look(WINDOW_NS + 1)
    assert found is not None
    assert found.new_tokens == (100,) * NUM_MIN + (300,) * NUM_MIN + (900,) * 2 * NUM_MIN
    assert (found.mean_prompt_tokens, found.mean_output_tokens) == (1200, 100)


def test_a_mix_is_looked_at_anew_now_and_then_and_stays_small() -> None:
    mixes = Mixes(WINDOW_NS)
    seen(mixes, NUM_MIN, 0, 1, 1, 1)
    first = mixes.look(0)
    seen(mixes, 2 * NUM_MAX, 1, 2, 2, 2)
    assert mixes.look(WINDOW_NS // 8 - 1) is first
    second = mixes.look(WINDOW_NS // 8)
    assert second is not None
    assert second.new_tokens == (2,) * NUM_MAX
