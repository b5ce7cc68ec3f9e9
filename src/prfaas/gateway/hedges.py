"""Leaves paths that are late and prefills that have stalled, as `core/hedging.py` says.

Paths over a link are remote ones, and local ones by way of a pulled prefix. Prefills on another
engine than the one that decodes are watched with and without a plan.
"""

from __future__ import annotations

import asyncio
import time

from prfaas.core.budgets import HEDGES, Budget
from prfaas.core.hedging import SOONER_RATIO, RemotePath, leaves, patience_ns
from prfaas.core.predictions import CostModel
from prfaas.gateway.deciding import Plan
from prfaas.gateway.driver import Driver
from prfaas.gateway.transfers import LATE, STALLED, TransferView
from prfaas.units import NS_PER_S

LOOKS = 20
"""Looks at a path in the time that it was predicted to take."""
LOOK_S_MIN, LOOK_S_MAX = 0.1, 1.0


class Hedges:
    """Leaves late paths, as far as the budget goes.

    Args:
        driver: Knows queues and links.
        costs: Predict a prefill at home; None without a plan, and then no path is late.
        ttft_max_ns: Target of the time to first token; None is no target.
    """

    def __init__(self, driver: Driver, costs: CostModel | None, ttft_max_ns: int | None) -> None:
        self._driver, self._costs, self._ttft_max_ns = driver, costs, ttft_max_ns
        self.budget = Budget(HEDGES)

    def watch(
        self, plan: Plan, transfer: TransferView, deadline_ns: int | None
    ) -> asyncio.Task[None] | None:
        """Break a transfer once its path is to be left; None where nothing is predicted.

        Args:
            plan: Of the request.
            transfer: Its blocks.
            deadline_ns: Instant at which the request's time is over; None without one.
        """
        now_ns, predicted_ns = time.monotonic_ns(), plan.routed.decision.predicted_ns
        if predicted_ns is None or self._costs is None:
            return None
        self.budget.deposit(now_ns)
        if self._ttft_max_ns is not None:
            at_ns = now_ns + self._ttft_max_ns
            deadline_ns = at_ns if deadline_ns is None else min(deadline_ns, at_ns)
        path = RemotePath(
            now_ns,
            predicted_ns,
            deadline_ns,
            self._driver.backlog_bytes(transfer.source, transfer.destination, now_ns),
        )
        return asyncio.create_task(self._look(plan, transfer, path, self._costs))

    async def watch_prefill(self, plan: Plan, transfer: TransferView) -> None:
        """Break a transfer once its prefill has stalled and a local one is sooner.

        Args:
            plan: Of the request.
            transfer: Blocks of the prefill that was sent.
        """
        sent_at_ns, number = time.monotonic_ns(), plan.ask.number
        if self._costs is None or transfer.stays:
            self.budget.deposit(sent_at_ns)
        expected_ns = self._driver.dispatcher.expected_prefill_ns(number)
        if expected_ns is None:
            return
        await asyncio.sleep(patience_ns(expected_ns) / NS_PER_S)
        while True:
            now_ns = time.monotonic_ns()
            new = plan.prompt.num_tokens - plan.pd_hit_tokens
            name = plan.decode.name
            local_ns = self._driver.dispatcher.expected_local_ns(name, new, now_ns)
            is_sooner = local_ns is None or local_ns * SOONER_RATIO < now_ns - sent_at_ns
            if is_sooner and self.budget.take(now_ns) is not None:
                transfer.break_with(STALLED)
                return
            await asyncio.sleep(LOOK_S_MAX)

    async def _look(
        self, plan: Plan, transfer: TransferView, path: RemotePath, costs: CostModel
    ) -> None:
        pause_s = min(max(path.predicted_ns / LOOKS / NS_PER_S, LOOK_S_MIN), LOOK_S_MAX)
        while True:
            await asyncio.sleep(pause_s)
            if transfer.broken.done() or transfer.has_arrived:
                return
            now_ns = time.monotonic_ns()
            rate = self._driver.link_bits_per_s(transfer.source, transfer.destination, now_ns)
            to_come_ns = path.to_come_ns(now_ns, rate)
            if not path.is_late(now_ns, to_come_ns):
                continue
            local_ns = self._local_ns(plan, costs, now_ns)
            if local_ns is None or not leaves(path, now_ns, to_come_ns, local_ns):
                continue
            if self.budget.take(now_ns) is not None:
                transfer.break_with(LATE)

    def _local_ns(self, plan: Plan, costs: CostModel, now_ns: int) -> int | None:
        """Time to the first token of a prefill at home that begins now; None is unknown."""
        routed, num_tokens = plan.routed, plan.prompt.num_tokens
        name = routed.prefill if routed.pulls else plan.decode.name
        wait_ns, factor = self._driver.wait_ns(name, now_ns), self._driver.local_correction
        if wait_ns is None:
            return None
        if routed.pulls:
            # It is in that queue already.
            own_ns = costs.local_prefill_ns(num_tokens - routed.hit_tokens)
            wait_ns = max(0, wait_ns - round(own_ns * factor))
        hits = self._driver.cached(plan.ask)[0]
        held = max(hits.get(routed.destination, 0), hits.get(name, 0))
        return wait_ns + round(costs.local_prefill_ns(max(1, num_tokens - held)) * factor)
