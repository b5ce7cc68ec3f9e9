"""A simulation that remembers every attempt of its first requests, for a trace viewer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prfaas.core.dispatch.types import Routed
from prfaas.sim.engine.prefill_instance import Job
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.system.request import UNSET, Outcome, Request
from prfaas.sim.system.setup import ClusterSetup, Setup

NUM_RECORDED_MAX = 5_000
"""Requests in a Chrome trace: about 20 events each, 20 MB, which viewers still open quickly."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One way of a request through the system. Instants in ns, UNSET if it did not get there.

    Attributes:
        request: Whose.
        number: 1 is the first.
        routed: Where it went and why.
        num_new_tokens: Tokens that are prefilled.
        decode: Instance that decodes; empty until it is chosen.
        lost: True if it ended because something broke.
    """

    request: Request
    number: int
    routed: Routed
    num_new_tokens: int
    routed_at_ns: int
    started_at_ns: int = UNSET
    prefilled_at_ns: int = UNSET
    landed_at_ns: int = UNSET
    admitted_at_ns: int = UNSET
    ended_at_ns: int = UNSET
    decode: str = ""
    lost: bool = False


class RecordedSimulation(Simulation):
    """The same run, with a record of its first requests.

    Args:
        setup: The system.
        requests: In order of arrival.
        on_progress: Called with the number of requests that have arrived, now and then.
        num_requests_max: Requests that are recorded.
    """

    def __init__(
        self,
        setup: Setup,
        requests: Sequence[Request],
        on_progress: Callable[[int], None] | None = None,
        num_requests_max: int = NUM_RECORDED_MAX,
    ) -> None:
        super().__init__(setup, requests, on_progress)
        self.attempts: list[Attempt] = []
        self.refused: list[Request] = []
        """Recorded requests that got a 429."""
        self._num_left = num_requests_max
        self._current: dict[Request, Attempt | None] = {}

    def _come(self, request: Request) -> None:
        if self._num_left > 0:
            self._num_left -= 1
            self._current[request] = None
        super()._come(request)

    def again(self, request: Request) -> None:
        """What a request had is lost: route it anew."""
        attempt = self._current.get(request)
        if attempt is not None:
            attempt.ended_at_ns, attempt.lost = self.clock.now_ns, True
        super().again(request)

    def _keep(self, request: Request, routed: Routed) -> None:
        self._begin(request, routed)
        super()._keep(request, routed)

    def _send_away(self, request: Request, routed: Routed) -> None:
        self._begin(request, routed)
        super()._send_away(request, routed)

    def _begin(self, request: Request, routed: Routed) -> None:
        if request in self._current:
            new, now_ns = request.num_new_tokens, self.clock.now_ns
            attempt = Attempt(request, request.attempt, routed, new, now_ns)
            self._current[request] = attempt
            self.attempts.append(attempt)

    def _started(
        self, job: Job, cluster: str, name: str, chunks: Callable[[int], list[tuple[int, int]]]
    ) -> None:
        super()._started(job, cluster, name, chunks)
        attempt = self._current.get(job.request)
        if attempt is not None:
            attempt.started_at_ns = self.clock.now_ns
            attempt.num_new_tokens = job.request.num_new_tokens

    def _local_done(self, job: Job) -> None:
        self._prefilled(job)
        super()._local_done(job)

    def _remote_done(self, cluster: ClusterSetup, job: Job) -> None:
        self._prefilled(job)
        super()._remote_done(cluster, job)

    def _prefilled(self, job: Job) -> None:
        attempt = self._current.get(job.request)
        if attempt is not None and attempt.number == job.attempt:
            attempt.prefilled_at_ns = self.clock.now_ns

    def _decode(self, request: Request) -> None:
        attempt = self._current.get(request)
        if attempt is not None:
            attempt.landed_at_ns = self.clock.now_ns
            attempt.decode = self.front.choose_decode(request) or ""
        super()._decode(request)

    def _first(self, request: Request) -> None:
        attempt = self._current.get(request)
        if attempt is not None:
            attempt.admitted_at_ns = self.clock.now_ns
        super()._first(request)

    def _end(self, request: Request, outcome: Outcome) -> None:
        is_recorded = request in self._current
        attempt = self._current.pop(request, None)
        if attempt is not None:
            attempt.ended_at_ns = self.clock.now_ns
        elif is_recorded and outcome is Outcome.REJECTED:
            self.refused.append(request)
        super()._end(request, outcome)
