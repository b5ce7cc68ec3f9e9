"""A broken transfer in the simulator: recomputed is what lies behind the last checkpoint."""

from __future__ import annotations

import pytest

from benchmarks.sim.broken_transfers import CUT_AT, simulated
from prfaas.units import NS_PER_S

TOKENS, SPACING, LINK = 131_072, 16_384, "100Gbps"


def test_a_cut_transfer_resumes_at_the_last_checkpoint_and_is_sooner() -> None:
    plain = simulated(TOKENS, 0, LINK)
    costs = plain.scenario.setup.costs
    cut_s = CUT_AT * costs.remote_prefill_ns(TOKENS) / NS_PER_S
    without, resumed = (simulated(TOKENS, each, LINK, cut_s) for each in (0, SPACING))
    [lost], [kept] = without.simulation.requests, resumed.simulation.requests
    assert (lost.kept_tokens, lost.num_hit_tokens) == (0, 0)
    assert kept.kept_tokens % SPACING == 0
    assert kept.kept_tokens == kept.num_hit_tokens > TOKENS // 3
    rest_ns = costs.local_prefill_ns(TOKENS - kept.kept_tokens, kept.kept_tokens)
    saved_ns = costs.local_prefill_ns(TOKENS) - rest_ns
    assert lost.ttft_ns - kept.ttft_ns == pytest.approx(saved_ns, rel=0.02)


def test_an_unbroken_transfer_ships_every_checkpoint() -> None:
    plain, more = (simulated(TOKENS, each, LINK) for each in (0, SPACING))
    sent, with_states = (
        sum(link.sent_bytes for link in found.simulation.links) for found in (plain, more)
    )
    num_extra = (TOKENS - 1) // SPACING
    extra = num_extra * plain.scenario.setup.costs.state_bytes
    assert with_states - sent == pytest.approx(extra, abs=4096)  # Whole nanoseconds.
