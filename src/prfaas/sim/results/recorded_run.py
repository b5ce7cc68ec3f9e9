"""A simulation that remembers every attempt of its first requests, for a trace viewer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prfaas.core.dispatch.types import Routed
from prfaas.core.request.events import Outcome
from prfaas.core.routing.decision import Path
from prfaas.sim.engine.request_run import RunParts, SimulatedRequestRun
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.system.request import UNSET, Request
from prfaas.sim.system.setup import Setup

NUM_RECORDED_MAX = 5_000
"""Requests in a Chrome trace: about 20 events each, 20 MB, which viewers still open quickly."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One way of a request through the system. Instants in ns, UNSET if it did not get there.

    Attributes:
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


class _RecordedRun(SimulatedRequestRun):
    """A request whose attempts are recorded in `attempts`."""

    __slots__ = ("_attempts", "_current")

    def __init__(
        self, parts: RunParts, request: Request, routed: Routed, attempts: list[Attempt]
    ) -> None:
        self._attempts = attempts
        super().__init__(parts, request, routed)

    def _begin(self, routed: Routed) -> Attempt:
        request = self.request
        at_ns = request.routed_at_ns
        attempt = Attempt(request, request.attempt, routed, request.num_new_tokens, at_ns)
        self._attempts.append(attempt)
        return attempt

    def _take(self, routed: Routed) -> None:
        if self.request.attempt:
            self.close(lost=True)
        super()._take(routed)
        self._current = self._begin(routed)

    def _recompute(self) -> None:
        self.close(lost=True)
        super()._recompute()
        destination, decision = self.routed.destination, self.routed.decision
        local, here = decision._replace(path=Path.LOCAL), self.decoder
        route = self.routed._replace(decision=local, cluster=destination, prefill=here, source="")
        self._current = self._begin(route)

    def prefill_failed(self, *, may_have_died: bool) -> None:
        self.close(lost=True)
        super().prefill_failed(may_have_died=may_have_died)

    def first_token(self) -> None:
        self._current.admitted_at_ns = self._parts.clock.now_ns
        super().first_token()

    def broke(self, *, had_request: bool) -> None:
        self.close(lost=True)
        super().broke(had_request=had_request)

    def close(self, *, lost: bool) -> None:
        """The attempt is over; its instants are the request's as of now."""
        attempt, request = self._current, self.request
        if attempt.ended_at_ns != UNSET:
            return
        attempt.ended_at_ns, attempt.lost = self._parts.clock.now_ns, lost
        attempt.decode = self.decoder
        began_ns = request.routed_at_ns
        instants = request.prefill_started_at_ns, request.prefilled_at_ns, request.landed_at_ns
        started, prefilled, landed = (at if at >= began_ns else UNSET for at in instants)
        attempt.started_at_ns = started
        attempt.prefilled_at_ns, attempt.landed_at_ns = prefilled, landed
        attempt.num_new_tokens = request.num_new_tokens


class RecordedSimulation(Simulation):
    """The same run, with a record of its first requests.

    Args:
        on_progress: Called with the number of requests that have arrived, now and then.
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

    def _come(self, request: Request) -> None:
        super()._come(request)
        if self._num_left > 0 and request.outcome is Outcome.REJECTED:
            self.refused.append(request)
        self._num_left -= 1

    def _run_of(self, request: Request, routed: Routed) -> SimulatedRequestRun:
        if self._num_left <= 0:
            return super()._run_of(request, routed)
        return _RecordedRun(self, request, routed, self.attempts)

    def ended(self, run: SimulatedRequestRun) -> None:
        """A request that was admitted is over."""
        if isinstance(run, _RecordedRun):
            run.close(lost=False)
        super().ended(run)
