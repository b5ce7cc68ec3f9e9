"""Prefixes that a request prefilled at home fetches from a PrfaaS cluster, as the core decided.

The leg that prefills starts at once: its engine queues it, and waits for the blocks on their way as
a decode leg does for those of a hand-off. A pull that fails or is late is given up, and the engine
computes what has not arrived.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from functools import partial

from prfaas.core.breakers import Told
from prfaas.gateway.deciding import Plan
from prfaas.gateway.driver import Driver
from prfaas.gateway.exchange import Exchange
from prfaas.gateway.guards import Guards
from prfaas.gateway.hedges import Hedges
from prfaas.gateway.metrics import Metrics
from prfaas.gateway.pools import Pools
from prfaas.gateway.prefixes import Fetcher, Prefix
from prfaas.gateway.records import Outcome
from prfaas.gateway.transfers import UNKNOWN, PrefixPull, Transfers, TransferView
from prfaas.units import NS_PER_S
from prfaas.wire.frames import TRANSFER_ID_BYTES

WHOLE = "whole"
"""A pull whose prefix the engine found."""
ENDED_EARLY = "ended_early"
"""The request ended, or its engine did, before the prefix was of use."""
NOT_ASKED, REFUSED, TIMEOUT = "not_asked", "refused", "timeout"


@dataclass(frozen=True, slots=True)
class Pulling:
    """Begins pulls of requests, gives them up, and judges them.

    Attributes:
        fetcher: Asks pools for them.
        transfers: Follow them.
        pools: Hear of those that are given up.
        driver: Books them.
        guards: Hear of them.
        hedges: Tell when one is to be left.
        metrics: Count them.
        timeout_ns: How long engines wait for one.
    """

    fetcher: Fetcher
    transfers: Transfers
    pools: Pools
    driver: Driver
    guards: Guards
    hedges: Hedges
    metrics: Metrics
    timeout_ns: int

    def begin(self, exchange: Exchange, plan: Plan) -> None:
        """Have the prefix fetched that the decision counts on; nothing without one."""
        found, layout = plan.routed, plan.layout
        if not found.pulls or layout is None:
            return
        hashes = plan.ask.hashes[: found.hit_tokens // layout.tokens_per_hash]
        prefix = Prefix(layout, hashes, plan.ask.tenant)
        transfer = self.transfers.open(
            secrets.token_bytes(TRANSFER_ID_BYTES), found.source, found.destination, plan.ask.number
        )
        transfer.trace = exchange.trace.of_transfer(exchange.record)
        pull = PrefixPull(transfer, found.home_tokens, found.hit_tokens)
        exchange.record.transfer, exchange.pull = transfer, pull
        if not self.fetcher.fetch(transfer, prefix, found.present_tokens):
            self._lose(exchange, plan, NOT_ASKED)
            return
        self.guards.began((transfer.source, transfer.destination))
        hedge = self.hedges.watch(plan, transfer, exchange.record.deadline_ns)
        on_broken = partial(self._broken, exchange, plan)
        pull.watch(on_broken, hedge, self.timeout_ns / NS_PER_S, TIMEOUT)

    def give_up(self, exchange: Exchange, why: str) -> None:
        """Nobody waits for it any more; nothing without a pull under way."""
        pull = exchange.pull
        if pull is not None and not pull.outcome:
            pull.end(ENDED_EARLY)
            self._abort(pull.transfer, Told.NOTHING, why)

    def end(self, exchange: Exchange) -> None:
        """The request is over: what came of its pull."""
        pull, record = exchange.pull, exchange.record
        if pull is None:
            return
        cached = record.cached_tokens if record.outcome is Outcome.FINISHED else None
        if cached is None:
            self.give_up(exchange, "the request ended early")
        elif not pull.outcome:
            self._judge(exchange, pull, cached)
        record.pulled_tokens = pull.num_of_use(cached or 0)
        self.metrics.pulls.ended(pull, record.pulled_tokens)

    def _judge(self, exchange: Exchange, pull: PrefixPull, cached: int) -> None:
        """It was not given up: did the engine find it?"""
        transfer = pull.transfer
        if cached >= pull.hit_tokens:
            pull.end(WHOLE)
            self.pools.release(transfer)
            return
        reason = "blocks_missing" if transfer.failure == UNKNOWN else transfer.failure
        pull.end(reason)
        if transfer.has_arrived:
            self.pools.release(transfer)
        else:
            self._abort(transfer, Told.NOTHING, "the engine went on without it")
        exchange.lose_pull(reason, f"the engine found {cached} of {pull.hit_tokens} tokens")

    def _broken(self, exchange: Exchange, plan: Plan, broken: asyncio.Future[str]) -> None:
        pull = exchange.pull
        if broken.cancelled() or pull is None or pull.outcome or pull.transfer.is_complete:
            return
        reason, has_ended = broken.result(), pull.transfer.has_arrived
        self._lose(exchange, plan, reason)
        # Of a pull that its destination refuses, no end is told.
        told = Told.FAILED if reason == REFUSED and not has_ended else Told.NOTHING
        self._abort(pull.transfer, told, f"the prefix is computed: {reason}")

    def _lose(self, exchange: Exchange, plan: Plan, reason: str) -> None:
        """What has not arrived is computed."""
        assert exchange.pull is not None  # noqa: S101 (asked before)
        exchange.pull.end(reason)
        self.driver.lose_pull(plan.ask.number, time.monotonic_ns())
        exchange.lose_pull(reason, "what has not arrived of the prefix is computed")

    def _abort(self, transfer: TransferView, told: Told, why: str) -> None:
        self.pools.abort(transfer, why)
        self.guards.ended((transfer.source, transfer.destination), told)
