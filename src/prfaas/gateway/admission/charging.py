"""Token charges of a request: computed tokens, not delivered ones."""

from __future__ import annotations

import time
from math import ceil

from prfaas.core.admission.quotas import OutputRate
from prfaas.core.request.events import Outcome
from prfaas.gateway.engines.engine_probes import EngineProbes
from prfaas.gateway.openai.requests import ClientRequest
from prfaas.gateway.telemetry.request_records import RequestRecord
from prfaas.gateway.tenancy.tenants import Tenant
from prfaas.units import NS_PER_S

FASTEST_PER_S = 1000
"""Tokens that one sequence can have had made in a second while no speed is known: neither what a
request allows nor the rest of the model's length is a bound to charge a client for that left."""


class Charging:
    """Charges output when a request is admitted, and settles that when it ends.

    Args:
        probes: Of engines, for the tokens that they count.
    """

    def __init__(self, probes: EngineProbes) -> None:
        probes.on_made = self.made
        self._rate = OutputRate()
        self._engines = OutputRate()
        """By the counters of engines, until an answer was seen whole."""

    def made(self, num_tokens: int, num_sequences: int, duration_ns: int) -> None:
        """An engine has made so many tokens for its sequences in a time, ns."""
        self._engines.observe(num_tokens, num_sequences, duration_ns)

    def settle(self, tenant: Tenant, record: RequestRecord) -> None:
        """Charge what a request has had made, in place of what was charged for it before.

        Of an answer that is cut short by its client or its time limit, tokens were made that nobody
        has counted: as many as the fastest answers of late had in the time, at most what it allows.
        """
        now_ns = time.monotonic_ns()
        asked_at_ns, sequences = record.decode_at_ns, record.num_sequences
        if asked_at_ns is not None and record.outcome is Outcome.FINISHED:
            first_ns = record.started_at_ns + (record.decoding_ns or 0)
            since_ns = max(asked_at_ns, first_ns)
            self._rate.observe(record.num_output_tokens, sequences, now_ns - since_ns)
        elif asked_at_ns is not None and record.outcome in (Outcome.CANCELLED, Outcome.TIMED_OUT):
            record.abandoned(self._unseen(record, asked_at_ns, now_ns))
        used = record.num_output_tokens + record.num_abandoned_tokens
        tenant.quota.count_tokens(used - record.reserved_tokens, now_ns)

    def _unseen(self, record: RequestRecord, asked_at_ns: int, now_ns: int) -> int:
        sequences, left = record.num_sequences, record.output_tokens_max - record.num_output_tokens
        if record.output_at_ns is not None:
            made = self._rate.since(sequences, now_ns - record.output_at_ns)
        else:
            made = self._most(sequences, now_ns - asked_at_ns)
        return max(0, min(made, left))

    def _most(self, num_sequences: int, passed_ns: int) -> int:
        """Tokens that sequences of which nothing was seen have had made in a time, at most."""
        for rate in (self._rate, self._engines):
            made = rate.most(num_sequences, passed_ns)
            if made is not None:
                return made
        return num_sequences * ceil(FASTEST_PER_S * passed_ns / NS_PER_S)


def reserve(client: ClientRequest, room: int, tenant: Tenant, record: RequestRecord) -> None:
    """Charge the output that a request declares; `Charging.settle` charges what it had made.

    Args:
        room: Tokens left for an answer by the model's length.
        record: Takes what was charged, and the most there can be.
    """
    each = room if client.max_tokens is None else min(room, client.max_tokens)
    output_tokens_max = each * client.num_sequences
    reserved_tokens = 0 if client.max_tokens is None else output_tokens_max
    record.charged(output_tokens_max, reserved_tokens)
    tenant.quota.count_tokens(reserved_tokens, time.monotonic_ns())
