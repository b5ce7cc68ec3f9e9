"""Expected times of open requests, as the watches of late prefills and routes ask for them."""

from __future__ import annotations

from prfaas.core.dispatch.open_requests import OpenRequests
from prfaas.core.dispatch.route_finder import RouteFinder
from prfaas.core.resilience.late_routes import usual_ns


class ExpectedTimes:
    """Answers from what open requests have booked; nothing is changed. All times in ns.

    Args:
        routes: Instances and the times of their prefills.
    """

    def __init__(self, requests: OpenRequests, routes: RouteFinder) -> None:
        self._requests, self._routes, self._times = requests, routes, routes.times

    def prefill_ns(self, request_id: int) -> int | None:
        """Expected time from sending a prefill to its answer, by a plan or by what was observed of
        its cluster; None while both are unknown."""
        routed = self._requests.route_of(request_id)
        if routed is None:
            return None
        if self._times.has_plan:
            return routed.decision.predicted_ns
        return self._times.observed_ns(request_id)

    def prefill_left_ns(self, request_id: int, now_ns: int) -> int | None:
        """Expected time until a prefill that was sent ends, by what is before it in its queue.

        None is unknown, also where the instance does not get on with its first prompt.
        """
        routed = self._requests.route_of(request_id)
        ahead = self._requests.prefill_ahead(request_id, now_ns)
        if ahead is None or routed is None:
            return None
        cluster, first_ns = routed.cluster, ahead.first_ns
        first = self._times.queue_ns(cluster, first_ns, first_ns, now_ns)
        left = self._times.queue_ns(cluster, ahead.own_ns, ahead.work_ns, now_ns)
        if first is None or left is None or ahead.spent_ns > usual_ns(first):
            return None
        return max(1, left - min(ahead.spent_ns, first))

    def local_prefill_ns(
        self,
        name: str,
        num_new_tokens: int,
        prefix_tokens: int,
        now_ns: int,
        *,
        apart: bool = False,
    ) -> int | None:
        """Expected time of a prefill in the PD cluster from now on, by the instance that is to
        decode or by another one; None is unknown. `apart`: not beside decode steps, where instances
        have roles."""
        if apart and self._requests.decode_book is not None:
            wait_ns = self._routes.local.least_wait_ns(now_ns)
        else:
            wait_ns = self._wait_ns(name, num_new_tokens, prefix_tokens, now_ns)
        if wait_ns is None:
            return None
        return self._times.with_queue_ns(wait_ns, num_new_tokens, prefix_tokens, now_ns)

    def decoder_prefills(
        self, name: str, num_new_tokens: int, prefix_tokens: int, now_ns: int
    ) -> bool:
        """Return True if the instance that is to decode a prompt should prefill it, too, rather
        than another one of the PD cluster.

        Where instances have roles it has but a share of its time for that, and meanwhile all that
        it decodes stands still: that delay counts once for each of them.
        """
        requests = self._requests
        if requests.decode_book is None:
            return True
        others_ns = self._routes.local.least_wait_ns(now_ns)
        if others_ns is None:
            return self._routes.local.book.num_ready == 0
        own_ns = requests.instances.wait_ns(name, now_ns)
        work_ns = self._times.local_ns(num_new_tokens, prefix_tokens)
        if own_ns is None or not requests.instances.spare.has(name, now_ns):
            return False
        return own_ns + self._delay_ns(name, work_ns) < others_ns

    def _delay_ns(self, name: str, work_ns: int) -> int:
        """Delay of what an instance decodes while it prefills, in all."""
        book = self._requests.decode_book
        return 0 if book is None else work_ns * max(0, book.num_on(name) - 1)

    def _wait_ns(
        self, name: str, num_new_tokens: int, prefix_tokens: int, now_ns: int
    ) -> int | None:
        """Wait for a prefill in the PD cluster, by an instance that decodes or by another one."""
        if self.decoder_prefills(name, num_new_tokens, prefix_tokens, now_ns):
            return self._requests.instances.wait_ns(name, now_ns)
        return self._routes.local.least_wait_ns(now_ns)

    def local_path_ns(
        self, request_id: int, name: str, held_tokens: int, now_ns: int, *, beside: bool = False
    ) -> int | None:
        """Predicted time to first token of a request that takes the local path now.

        Args:
            request_id: The request; None is returned if it is not open, or without a cost model.
            name: PD instance that would decode.
            held_tokens: Prefix that is there by now.
            beside: That instance has the request, and would prefill it beside what it decodes, if
                it has time for that.
        """
        routed = self._requests.route_of(request_id)
        if routed is None or not self._times.has_plan:
            return None
        num_new_tokens = max(1, routed.facts.num_prompt_tokens - held_tokens)
        prefix_tokens = routed.facts.num_prompt_tokens - num_new_tokens
        if routed.pulls or beside:
            has_time = routed.pulls or self._requests.instances.spare.has(name, now_ns)
            wait_ns = self._requests.instances.wait_ns(name, now_ns) if has_time else None
        else:
            wait_ns = self._wait_ns(name, num_new_tokens, prefix_tokens, now_ns)
        if wait_ns is None:
            return None
        if routed.pulls:
            # Its prefill is in that queue already.
            booked_ns = self._times.local_ns(routed.num_tokens_to_prefill, routed.hit_tokens)
            wait_ns = max(0, wait_ns - booked_ns)
        return wait_ns + self._times.local_ns(num_new_tokens, prefix_tokens)
