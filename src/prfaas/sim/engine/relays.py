"""Relay decode in virtual time: the batch of an instance that prefills is one answer."""

from __future__ import annotations

from collections.abc import Callable

from prfaas.sim.system.clock import Clock
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import Setup


class SimulatedRelay:
    """Tokens of one answer that the instance which prefilled makes after the first.

    Args:
        num_tokens: Most that it was asked for.
    """

    __slots__ = (
        *("_clock", "_most", "_on_all", "_request", "_setup"),
        *("_since_ns", "_step_ns", "is_over"),
    )

    def __init__(self, clock: Clock, setup: Setup, request: Request, num_tokens: int) -> None:
        self._clock, self._setup, self._request = clock, setup, request
        self._most = min(num_tokens, request.num_output_tokens - 1)
        self._step_ns = round(setup.step_ns(1, request.num_prompt_tokens))
        self._since_ns: int | None = None
        self._on_all: Callable[[], None] = lambda: None
        self.is_over = False

    @property
    def has_begun(self) -> bool:
        """Return True once the first token is out."""
        return self._since_ns is not None

    def begin(self) -> None:
        """The first token is out."""
        self._since_ns = self._clock.now_ns

    def go_on(self, on_all: Callable[[], None]) -> None:
        """Call `on_all` when all tokens are made, unless it is stopped before."""
        self._on_all = on_all
        self._clock.after(self._step_ns * self._most, self._made_all, None)

    def warm(self, on_warm: Callable[[], None]) -> None:
        """Call `on_warm` when the instance that decodes has the tokens so far: after a step, or a
        prefill of all since the last block if they are more than one."""
        request, setup = self._request, self._setup
        prompt, span = request.num_prompt_tokens, setup.blocks.tokens
        cached = (prompt - 1) // span * span
        num_new, took_ns = prompt + 1 + self._num_made - cached, self._step_ns
        if num_new > span:
            took_ns = setup.costs.local_prefill_ns(num_new, cached)
        self._clock.after(took_ns, lambda _: on_warm(), None)

    @property
    def _num_made(self) -> int:
        """Tokens after the first, by now."""
        since_ns = self._clock.now_ns if self._since_ns is None else self._since_ns
        return min((self._clock.now_ns - since_ns) // self._step_ns, self._most)

    def end(self) -> None:
        """Note the tokens that the client has by now."""
        if self._since_ns is None or self.is_over:
            return
        self.is_over = True
        if num_tokens := self._num_made:
            request = self._request
            request.relayed_tokens, request.had_tokens = num_tokens, 1 + num_tokens
            request.second_token_at_ns = self._since_ns + self._step_ns

    def _made_all(self, _: None) -> None:
        if not self.is_over:
            self.end()
            self._on_all()
