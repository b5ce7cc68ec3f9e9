"""A decode instance: a running batch that advances one token a step, and a queue before it.

Between two changes of the batch every sequence advances at the same pace, so one counter of steps
serves all: a sequence that joins at step v leaves at step v + its remaining tokens. A change of the
batch costs O(log batch), no matter how many tokens lie between.

An instance that computes what is missing of a prompt itself does a chunk of it in every step, which
makes its steps as much longer.

KV blocks are taken when a sequence joins the batch, not while its transfer waits for the link. The
pool keeps what has arrived, and the engine loads it then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from math import ceil

from prfaas.sim.system.clock import NEVER, Action, Clock
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import Setup


class DecodeInstance:
    """One instance.

    Args:
        setup: Step times, limits of batch and KV cache, and bytes of prompts.
        on_first: A sequence was admitted and streams its first token.
        on_done: A sequence has all its tokens.
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        setup: Setup,
        *,
        on_first: Callable[[Request], None],
        on_done: Callable[[Request], None],
    ) -> None:
        self.name, self.up, self.is_frozen = name, True, False
        self.kv_used_bytes = self.num_running_most = 0
        self.batch_ns = 0.0
        self._clock, self._step_ns, self._limits = clock, setup.step_ns, setup.decode
        self._costs, self._on_first, self._on_done = setup.costs, on_first, on_done
        self._waiting: deque[Request] = deque()
        self._running: list[tuple[float, int, Request, int, float]] = []
        """Step at which each sequence ends, number and request; its KV bytes, and its part of
        `_context_sum`."""
        self._steps, self._stepped_at_ns, self._pace_ns = 0.0, 0, 1.0
        self._chunk_ns = 0.0
        self._context_sum = 0.0
        self._leave_at_ns = self._asked_at_ns = NEVER
        self._leaving: Action = self._leave

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot or for KV blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    def fits(self, num_tokens: int) -> bool:
        """Return True if an empty instance can hold the KV blocks of a sequence."""
        capacity = self._limits.kv_capacity_bytes
        return capacity is None or self._costs.kv_bytes(num_tokens) <= capacity

    def submit(self, request: Request) -> None:
        """Queue a prefilled request."""
        self._waiting.append(request)
        self._advance()
        self._admit()
        self._plan_next()

    def compute(self, chunk_ns: float) -> float:
        """Prefill beside the batch from now on, in chunks that take so long; 0 is not any more.

        Returns:
            Time of a step of the batch without a chunk, ns: 0 without a batch.
        """
        self._advance()
        self._chunk_ns = chunk_ns
        self._plan_next()
        return self._pace_ns - chunk_ns if self._running else 0.0

    def fail(self) -> None:
        """Stop. Clients keep the tokens that they have."""
        self._advance()
        for end, _, request, *_ in self._running:
            left = max(1, ceil(end - self._steps - 1e-6))
            request.had_tokens = max(request.num_output_tokens - left, request.had_tokens)
        self.kv_used_bytes = 0
        self._running.clear()
        self._waiting.clear()
        self._context_sum, self._chunk_ns, self.up = 0.0, 0.0, False
        self._leave_at_ns = NEVER

    def recover(self) -> None:
        """Work again."""
        self.up = True
        self.freeze(on=False)

    def freeze(self, *, on: bool = True) -> None:
        """Stop without losing what it has, or go on."""
        self._advance()
        self.is_frozen = on
        self._admit()
        self._plan_next()

    def _advance(self) -> None:
        """Bring the counter of steps up to now."""
        now_ns = self._clock.now_ns
        elapsed, self._stepped_at_ns = now_ns - self._stepped_at_ns, now_ns
        if num_running := len(self._running):
            self.batch_ns += elapsed * num_running
            if not self.is_frozen:
                self._steps += elapsed / self._pace_ns

    def _admit(self) -> None:
        if not self._waiting or self.is_frozen:
            return
        running, limits, costs = self._running, self._limits, self._costs
        capacity = limits.kv_capacity_bytes
        while self._waiting and len(running) < limits.batch_max:
            # Engines take blocks as a sequence grows, and the sequences of a batch are at different
            # points of their outputs: each counts with half of its own.
            request = self._waiting[0]
            size = costs.kv_bytes(request.num_prompt_tokens + request.num_output_tokens // 2)
            if capacity is not None and self.kv_used_bytes + size > capacity:
                return
            self.kv_used_bytes += size
            self._waiting.popleft()
            self._on_first(request)
            had = request.had_tokens
            length, left = request.num_prompt_tokens + had, request.num_output_tokens - had - 1
            left = left if left > 0 else 0
            self._context_sum += length - self._steps
            end = self._steps + left
            heappush(running, (end, request.index, request, size, length - (end - left)))
            self.num_running_most = max(self.num_running_most, len(running))

    def _plan_next(self) -> None:
        if not self._running or self.is_frozen:
            self._leave_at_ns = NEVER
            return
        batch, steps = len(self._running), self._steps
        self._pace_ns = self._step_ns(batch, self._context_sum / batch + steps) + self._chunk_ns
        left = self._running[0][0] - steps
        due_ns = round(left * self._pace_ns) if left > 0.0 else 0
        self._leave_at_ns = self._clock.now_ns + due_ns
        self._ask()

    def _ask(self) -> None:
        """Be called when the next sequence ends, or before: that costs less than every change."""
        if self._leave_at_ns < self._asked_at_ns:
            self._asked_at_ns = self._leave_at_ns
            self._clock.at(self._asked_at_ns, self._leaving, self._asked_at_ns)

    def _leave(self, asked_at_ns: int) -> None:
        if asked_at_ns != self._asked_at_ns:
            return
        self._asked_at_ns = NEVER
        if asked_at_ns < self._leave_at_ns:
            self._ask()
            return
        self._advance()
        running = self._running
        # The instant was rounded to whole nanoseconds: take the counter to the planned end.
        self._steps = max(self._steps, running[0][0])
        while running and running[0][0] <= self._steps + 1e-6:
            _, _, request, num_bytes, context = heappop(running)
            self._context_sum -= context
            self.kv_used_bytes -= num_bytes
            self._on_done(request)
        self._admit()
        self._plan_next()
