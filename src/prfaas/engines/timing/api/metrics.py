"""Metrics of an instance, under vLLM's names."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prfaas.engines.timing.instance import Instance

LABELS = ["engine", "model_name"]
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)


class _State(Collector):
    """Read from the instance at every request."""

    def __init__(self, instance: Instance, model: str) -> None:
        self._instance, self._values = instance, ["0", model]

    def collect(self) -> list[Metric]:
        """All of them."""
        instance, counts = self._instance, self._instance.counts
        gauges: dict[str, float] = {
            "vllm:num_requests_running": instance.scheduler.num_running,
            "vllm:num_requests_waiting": instance.num_waiting,
            "vllm:kv_cache_usage_perc": instance.cache.usage_ratio,
            "timing:behind_profile_seconds": counts.late_ns / 1e9,
        }
        counters: dict[str, float] = {
            "vllm:prefix_cache_queries": counts.queried_tokens,
            "vllm:prefix_cache_hits": counts.hit_tokens,
            "vllm:external_prefix_cache_queries": counts.external_queried_tokens,
            "vllm:external_prefix_cache_hits": counts.external_hit_tokens,
            "vllm:prompt_tokens": counts.prompt_tokens,
            "vllm:generation_tokens": counts.output_tokens,
            "timing:stained_loads": counts.stained,
        }
        return [
            *(self._family(GaugeMetricFamily, name, value) for name, value in gauges.items()),
            *(self._family(CounterMetricFamily, name, value) for name, value in counters.items()),
        ]

    def _family(
        self, kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, value: float
    ) -> Metric:
        family = kind(name, "Of the timing engine.", labels=LABELS)
        family.add_metric(self._values, value)
        return family


class Metrics:
    """Metrics of one instance.

    Args:
        instance: The instance.
        model: Name of its model.
    """

    def __init__(self, instance: Instance, model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_State(instance, model))
        self._values = "0", model
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
        ).labels(*self._values)
        self._e2e = Histogram(
            "vllm:e2e_request_latency_seconds",
            "From arrival to the last token.",
            LABELS,
            buckets=SECONDS,
            registry=self._registry,
        ).labels(*self._values)

    def first_token(self, seconds: float) -> None:
        """An answer has begun."""
        self._ttft.observe(seconds)

    def ended(self, reason: str, seconds: float) -> None:
        """An answer has ended, or was aborted ("abort")."""
        self._ended.labels(*self._values, reason).inc()
        self._e2e.observe(seconds)

    def text(self) -> bytes:
        """Text in Prometheus' format."""
        return generate_latest(self._registry)
