"""The gateway's side of a simulated run: late signals in, decisions of the core out.

It knows what a gateway knows: the prompt, the caches' index, reports with their age, and what it
has sent itself. Output lengths are not among it.
"""

from __future__ import annotations

from collections.abc import Sequence

from prfaas.core.admission import admit
from prfaas.core.link_book import LinkBook
from prfaas.core.load_book import LoadBook
from prfaas.core.policies import AdaptivePolicy, make_policy
from prfaas.core.predictions import BITS_PER_BYTE, PathSignals, predict
from prfaas.core.prefix_cache import PrefixCache
from prfaas.core.routing import Decision, Path, RoutingFacts
from prfaas.core.threshold_loop import ThresholdLoop
from prfaas.sim.setup import Setup
from prfaas.units import NS_PER_S


class Front:
    """Books, caches and the policy.

    Args:
        setup: The system.
    """

    def __init__(self, setup: Setup) -> None:
        stale_ns = setup.signals.stale_after_ns
        self._setup = setup
        self.local = LoadBook([f"p{i:05}" for i in range(setup.num_prefill)], stale_ns)
        self.remote = LoadBook([f"r{i:05}" for i in range(setup.num_prfaas)], stale_ns)
        self.link = LinkBook(stale_ns)
        self.link_up = True
        self.pd_cache = _cache(setup.cache.pd_blocks, setup.cache.checkpoint_blocks)
        self.prfaas_cache = _cache(setup.cache.prfaas_blocks, setup.cache.checkpoint_blocks)
        routing = setup.routing
        self._policy = make_policy(
            routing.policy, routing.offload_threshold, setup.costs, routing.bandwidth
        )
        self._loop = ThresholdLoop(max(routing.offload_threshold, 1))

    def hits(self, block_ids: Sequence[int], num_prompt_tokens: int) -> tuple[int, int]:
        """Usable cached prefix in the PD and the PrfaaS cluster, tokens."""
        limit, span = num_prompt_tokens - 1, self._setup.cache.block_tokens
        found = []
        for cache in (self.pd_cache, self.prfaas_cache):
            blocks = cache.usable_hit(block_ids) if cache is not None and block_ids else 0
            found.append(min(blocks * span, limit))
        return found[0], found[1]

    def decide(
        self, num_prompt_tokens: int, hits: tuple[int, int], now_ns: int
    ) -> tuple[Decision, PathSignals]:
        """Ask the policy."""
        facts = RoutingFacts(
            num_prompt_tokens=num_prompt_tokens,
            pd_hit_tokens=hits[0],
            prfaas_hit_tokens=hits[1],
            prefill_instance_ready=self.remote.least() is not None,
            link_up=self.link_up,
        )
        signals = self.signals(now_ns)
        return self._policy.decide(facts, signals), signals

    def admitted(
        self, decision: Decision, num_prompt_tokens: int, hits: tuple[int, int], now_ns: int
    ) -> bool:
        """Whether the request is let in."""
        if not self._setup.routing.admission:
            return True
        return admit(
            self._predicted(decision, num_prompt_tokens, hits, now_ns), self._setup.slo.ttft_ns
        ).admitted

    def signals(self, now_ns: int) -> PathSignals:
        """What is known now."""
        return PathSignals(
            local_wait_ns=_wait(self.local, now_ns),
            remote_wait_ns=_wait(self.remote, now_ns),
            link_backlog_bytes=self.link.backlog_bytes(now_ns),
            link_bits_per_s=self.link.bits_per_s(now_ns),
            rtt_ns=self._setup.link.rtt_ns,
        )

    def move_threshold(self, now_ns: int) -> None:
        """One interval of the short-term loop, if the policy has a threshold that moves."""
        if not isinstance(self._policy, AdaptivePolicy):
            return
        signals = self.signals(now_ns)
        remote_ns = signals.remote_wait_ns
        if remote_ns is not None and signals.link_backlog_bytes and signals.link_bits_per_s:
            link_ns = signals.link_backlog_bytes * BITS_PER_BYTE * NS_PER_S
            remote_ns = max(remote_ns, round(link_ns / signals.link_bits_per_s))
        self._policy.offload_threshold = self._loop.update(
            self.link.utilisation(now_ns), signals.local_wait_ns, remote_ns
        )

    @property
    def offload_threshold(self) -> int:
        """Current t, tokens."""
        if isinstance(self._policy, AdaptivePolicy):
            return self._policy.offload_threshold
        return self._setup.routing.offload_threshold

    def _predicted(
        self, decision: Decision, num_prompt_tokens: int, hits: tuple[int, int], now_ns: int
    ) -> int | None:
        facts = RoutingFacts(num_prompt_tokens, hits[0], hits[1])
        found = predict(facts, self.signals(now_ns), self._setup.costs)
        return found.remote_ns if decision.path is Path.REMOTE else found.local_ns


def _wait(book: LoadBook, now_ns: int) -> int | None:
    name = book.least()
    return None if name is None else book.wait_ns(name, now_ns)


def _cache(capacity_blocks: int | None, checkpoint_blocks: int) -> PrefixCache | None:
    return None if capacity_blocks == 0 else PrefixCache(capacity_blocks, checkpoint_blocks)
