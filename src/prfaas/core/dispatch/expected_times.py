"""Expected times of open requests, as the watches of late prefills and routes ask for them."""

from __future__ import annotations

from prfaas.core.dispatch.open_requests import OpenRequests
from prfaas.core.dispatch.route_finder import RouteFinder


class ExpectedTimes:
    """Answers from what open requests have booked; nothing is changed. All times in ns.

    Args:
        requests: Open requests.
        routes: Instances and the times of their prefills.
    """

    def __init__(self, requests: OpenRequests, routes: RouteFinder) -> None:
        self._requests, self._times = requests, routes.times

    def prefill_ns(self, request_id: int) -> int | None:
        """Expected time from sending a prefill to its answer, by a plan or by what was observed of
        its cluster; None while both are unknown."""
        routed = self._requests.route_of(request_id)
        if routed is None:
            return None
        if self._times.has_plan:
            return routed.decision.predicted_ns
        return self._times.observed_ns(request_id)

    def local_prefill_ns(self, name: str, num_new_tokens: int, now_ns: int) -> int | None:
        """Expected time of a prefill that is sent to a PD instance now; None is unknown."""
        wait_ns = self._requests.wait_ns(name, now_ns)
        return (
            None if wait_ns is None else self._times.with_queue_ns(wait_ns, num_new_tokens, now_ns)
        )

    def local_path_ns(
        self, request_id: int, name: str, held_tokens: int, now_ns: int
    ) -> int | None:
        """Predicted time to first token of a request that takes the local path now.

        Args:
            request_id: The request; None is returned if it is not open, or without a cost model.
            name: PD instance that would prefill.
            held_tokens: Prefix that is there by now.
            now_ns: Time.
        """
        routed = self._requests.route_of(request_id)
        if routed is None or not self._times.has_plan:
            return None
        wait_ns = self._requests.wait_ns(name, now_ns)
        if wait_ns is None:
            return None
        if routed.pulls:
            # Its prefill is in that queue already.
            wait_ns = max(0, wait_ns - self._times.local_ns(routed.num_tokens_to_prefill))
        num_new_tokens = routed.facts.num_prompt_tokens - held_tokens
        return wait_ns + self._times.local_ns(max(1, num_new_tokens))
