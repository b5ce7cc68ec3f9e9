"""The console's sums of each second are those of the metrics, and cost next to nothing."""

from itertools import product

from prfaas.core.dispatch.types import RefusalReason
from prfaas.core.request.actions import FellBack
from prfaas.core.request.events import Outcome
from prfaas.core.routing.decision import Decision, Path, Reason
from prfaas.gateway.telemetry.metrics import GatewayMetrics
from prfaas.gateway.telemetry.request_records import RequestRecord
from tests.instructions import counted


def sums(metrics: GatewayMetrics, name: str, **labels: str) -> float:
    """Sum over the series with these labels."""
    [family] = (each for each in metrics.registry.collect() if each.name == f"prfaas_{name}")
    return sum(
        sample.value
        for sample in family.samples
        if not sample.name.endswith("_created") and labels.items() <= sample.labels.items()
    )


def test_totals_are_sums_of_the_series() -> None:
    metrics = GatewayMetrics()
    outcomes = [each for each in Outcome if each is not Outcome.RUNNING]
    for path, outcome in product((*Path, None), outcomes):
        record = RequestRecord("id", "chat", "tenant")
        record.outcome = outcome
        record.decision = path and Decision(path, Reason.ALWAYS_REMOTE, 1, 1)
        metrics.began()
        if outcome is not Outcome.FINISHED:
            metrics.ended(record)
    for stage, why in (("decode", "broken"), ("prefill", "refused"), ("prefill", "timeout")):
        record = RequestRecord("id", "chat", "tenant")
        record.fell_back(FellBack(stage, why, "because"))
        metrics.fell_back(record)
    record.refusal = next(iter(RefusalReason))
    metrics.decided(record)
    found, instructions = counted(metrics.totals)
    assert found.num_in_flight == sums(metrics, "requests_in_flight") == 3
    for path, num in ((Path.REMOTE, found.num_remote), (Path.LOCAL, found.num_local)):
        rejected = sums(metrics, "requests", path=path, outcome=Outcome.REJECTED)
        assert num == sums(metrics, "requests", path=path) - rejected == len(outcomes) - 2
    assert found.num_refused == sums(metrics, "requests_refused") == 1
    assert (found.num_fallbacks, sums(metrics, "fallback")) == (1, 3)
    # A reading of all series took 29,000.
    assert instructions < 300
