"""Metrics of the instances behind a URL, under vLLM's names; the load of SGLang's under theirs."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prfaas.engines.timing.instance import TimedInstance

LABELS = ["engine", "model_name"]
_Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)


class _State(Collector):
    """Read from the instances at every request."""

    def __init__(self, instances: list[TimedInstance], model: str) -> None:
        self._instances, self._model = instances, model

    def collect(self) -> list[Metric]:
        """All of them, with a sample for each data-parallel rank."""
        values = [_values(instance) for instance in self._instances]
        return [
            self._family(kind, name, [each[kind, name] for each in values])
            for kind, name in (values[0] if values else ())
        ]

    def _family(self, kind: _Kind, name: str, values: list[float]) -> Metric:
        family = kind(name, "Of the timing engine.", labels=LABELS)
        for rank, value in enumerate(values):
            family.add_metric([str(rank), self._model], value)
        return family


VLLM = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
SGLANG = "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"


def _values(instance: TimedInstance) -> dict[tuple[_Kind, str], float]:
    counts = instance.counts
    running, waiting, use = VLLM if instance.layout.takes_orders else SGLANG
    gauges = {
        running: instance.scheduler.num_answers,
        waiting: instance.num_waiting,
        use: instance.scheduler.kv_usage_ratio,
        "timing:behind_profile_seconds": counts.late_ns / 1e9,
    }
    counters = {
        "vllm:prefix_cache_queries": counts.queried_tokens,
        "vllm:prefix_cache_hits": counts.hit_tokens,
        "vllm:external_prefix_cache_queries": counts.external_queried_tokens,
        "vllm:external_prefix_cache_hits": counts.external_hit_tokens,
        "vllm:prompt_tokens": counts.prompt_tokens,
        "vllm:generation_tokens": counts.output_tokens,
        "timing:stained_loads": counts.stained,
        "timing:steps": counts.steps,
        "timing:late_step_seconds": counts.late_sum_ns / 1e9,
    }
    found: dict[tuple[_Kind, str], float] = {(GaugeMetricFamily, n): v for n, v in gauges.items()}
    return found | {(CounterMetricFamily, name): value for name, value in counters.items()}


class TimingMetrics:
    """Metrics of the instances behind a URL.

    Args:
        model: Name of their model.
    """

    def __init__(self, model: str) -> None:
        self._registry, self._instances = CollectorRegistry(), list[TimedInstance]()
        self._registry.register(_State(self._instances, model))
        self._model = model
        self._ended = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            [*LABELS, "finished_reason"],
            registry=self._registry,
        )
        self._ttft = Histogram(
            "vllm:time_to_first_token_seconds",
            "From arrival to the first token.",
            LABELS,
            buckets=SECONDS,
            registry=self._registry,
        )
        self._e2e = Histogram(
            "vllm:e2e_request_latency_seconds",
            "From arrival to the last token.",
            LABELS,
            buckets=SECONDS,
            registry=self._registry,
        )

    def add(self, instance: TimedInstance) -> str:
        """Add an instance; returns its data-parallel rank, the label `engine` of its metrics."""
        self._instances.append(instance)
        rank = str(len(self._instances) - 1)
        self._ttft.labels(rank, self._model)
        self._e2e.labels(rank, self._model)
        return rank

    def first_token(self, rank: str, seconds: float) -> None:
        """An answer has begun."""
        self._ttft.labels(rank, self._model).observe(seconds)

    def ended(self, rank: str, reason: str, seconds: float) -> None:
        """An answer has ended, or was aborted ("abort")."""
        self._ended.labels(rank, self._model, reason).inc()
        self._e2e.labels(rank, self._model).observe(seconds)

    def text(self) -> bytes:
        """Text in Prometheus' format."""
        return generate_latest(self._registry)
