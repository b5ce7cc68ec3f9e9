"""Scheduler steps that have nothing to run, while blocks are in transit."""

from __future__ import annotations

from collections.abc import Callable, Iterable

EMPTY_STEP_S = 0.01
"""Longest pause of a step that runs nothing: a request that comes meanwhile waits for its end."""


class EmptySteps:
    """Finds the steps of a scheduler that may pause, and the requests that need no new lookup.

    vLLM's scheduler steps a thousand times a second while a request waits for blocks, and looks up
    all blocks of all such requests in every step. What it waits for is news of the pool node.

    Args:
        must_wait: Returns True while all lookups of a request would be answered as before.
        wait_for_news: Waits for the pool node, up to a number of seconds.
    """

    def __init__(
        self, must_wait: Callable[[str], bool], wait_for_news: Callable[[float], None]
    ) -> None:
        self._must_wait = must_wait
        self._wait_for_news = wait_for_news
        self._running: set[str] = set()
        self._waiting: dict[str, int] = {}
        """Requests whose blocks are in transit, and the tokens that the engine had of them."""

    def is_waiting(self, request: str, num_computed_tokens: int) -> bool:
        """Return True if a lookup for the same prefix would again find blocks in transit."""
        waiting_with = self._waiting.get(request)
        return waiting_with == num_computed_tokens and self._must_wait(request)

    def looked_up(self, request: str, num_computed_tokens: int, *, decided: bool) -> None:
        """A request's blocks were looked up; not `decided` if some are in transit."""
        if decided:
            self._waiting.pop(request, None)
        else:
            self._waiting[request] = num_computed_tokens

    def scheduled(self, started: Iterable[str], left: Iterable[str]) -> None:
        """Requests were scheduled, and others finished or were preempted."""
        self._running.update(started)
        for request in left:
            self._running.discard(request)
            self._waiting.pop(request, None)

    def pause(self) -> None:
        """End a step that runs nothing and moves nothing: wait for news unless any request runs.

        A request that runs may have a step under way whose result the scheduler has to take.
        """
        if not self._running:
            self._wait_for_news(EMPTY_STEP_S)
