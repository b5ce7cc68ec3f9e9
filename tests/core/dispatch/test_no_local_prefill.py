"""No PD instance that prefills is ready: the PrfaaS cluster gets every prompt that it can have."""

from __future__ import annotations

import pytest

from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.links import LinkReport
from prfaas.core.dispatch.types import Arrival, RefusalReason, RefusedRequest
from prfaas.core.routing.decision import Path, Reason
from prfaas.core.routing.policies import PolicyName
from tests.core.dispatching import MS, dispatcher, sent

SHORT = 500  # below the threshold of 1,000
OF_MARKET = {PolicyName.COST}


def without_local(policy: PolicyName, *, mixed: bool = False) -> Dispatcher:
    """Instances of both PrfaaS clusters and those that decode are ready; none of `h0`, `h1` is."""
    made = dispatcher(policy, mixed=mixed)
    for name in ("s0", "f0", "f1"):
        made.describe(name, num_tokens_max=100_000, layout_id=b"l")
        made.set_ready(name, ready=True, now_ns=0)
        made.report_load(name, 0, 0)
    for name in ("h0", "h1"):
        made.set_ready(name, ready=False, now_ns=0)
    return made


@pytest.mark.parametrize("policy", sorted(set(PolicyName) - OF_MARKET - {PolicyName.LOCAL}))
def test_a_short_prompt_goes_to_the_only_cluster_that_prefills(policy: PolicyName) -> None:
    made = without_local(policy)
    foreseen = sent(made.foresee(Arrival(0, SHORT, SHORT, {}), 0))
    routed = sent(made.arrive(Arrival(0, SHORT, SHORT, {}), 0))
    assert routed == foreseen
    assert routed.decision.path is Path.REMOTE
    if policy is not PolicyName.REMOTE:
        assert routed.decision.reason is Reason.NO_LOCAL_INSTANCE
        assert "no PD engine that prefills is ready" in routed.decision.explanation
    assert routed.prefill in {"s0", "f0", "f1"}
    if policy is not PolicyName.OBSERVED:
        assert routed.shipped_bytes == SHORT * 1000


def test_a_prompt_goes_local_again_once_an_instance_is_ready() -> None:
    made = without_local(PolicyName.PAPER)
    made.describe("h0", num_tokens_max=100_000, layout_id=b"l")
    made.set_ready("h0", ready=True, now_ns=0)
    routed = sent(made.arrive(Arrival(0, SHORT, SHORT, {}), 0))
    assert (routed.decision.path, routed.prefill) == (Path.LOCAL, "h0")


@pytest.mark.parametrize("barred", ["link", "policy", "mixed", "unshippable"])
def test_what_cannot_or_may_not_go_there_is_refused(barred: str) -> None:
    policy = PolicyName.LOCAL if barred == "policy" else PolicyName.PAPER
    made = without_local(policy, mixed=barred == "mixed")
    if barred == "link":
        for source in ("slow", "fast"):
            for destination in ("home-0", "home-1"):
                made.set_link(source, destination, up=False)
    shippable = 0 if barred == "unshippable" else SHORT
    found = made.arrive(Arrival(0, SHORT, SHORT, {}, shippable_tokens=shippable), 0)
    assert isinstance(found, RefusedRequest)
    assert found.reason is RefusalReason.NO_INSTANCE


def test_a_link_that_comes_up_serves_the_next_prompt() -> None:
    made = without_local(PolicyName.PAPER)
    made.set_link("fast", "home-0", up=False)
    made.set_link("slow", "home-0", up=False)
    assert isinstance(made.arrive(Arrival(0, SHORT, SHORT, {}), 0), RefusedRequest)
    made.set_link("fast", "home-0", up=True)
    made.links.report("fast", "home-0", LinkReport(1, 1e10, 0, 0, MS))
    assert sent(made.arrive(Arrival(1, SHORT, SHORT, {}), 1)).cluster == "fast"
