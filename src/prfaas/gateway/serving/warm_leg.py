"""The leg before the end of a relay: the engine that decodes loads the blocks, and computes the
tokens so far, while the client gets further ones from the engine that prefilled.

Without it the client would wait for that between two tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prfaas.core.request.events import AnyEvent, DecodeWarmed
from prfaas.gateway.routing.transfer_tracker import TransferView
from prfaas.gateway.serving.prefill_leg import PrefillLeg
from prfaas.gateway.serving.request_state import StreamedAnswer
from prfaas.gateway.serving.routing_step import RoutedPrompt


class WarmLeg:
    """Runs the warm leg of one request, if it has one."""

    def __init__(self, leg: PrefillLeg, plan: RoutedPrompt) -> None:
        self._leg, self._plan = leg, plan
        self._task: asyncio.Task[None] | None = None
        self.found_tokens: int | None = None
        """Prefix that the engine found; None before it has answered."""

    def begin(
        self,
        engine: str,
        answer: StreamedAnswer,
        awaited: TransferView | None,
        report: Callable[[AnyEvent], None],
    ) -> None:
        """Have an engine compute the prompt and the tokens so far.

        Args:
            awaited: Blocks in transit to it.
            report: Gets `DecodeWarmed` once it has answered or failed; not if it is ended.
        """
        ids = [*self._plan.prompt.token_ids, *answer.token_ids]
        self._task = asyncio.create_task(self._run(engine, ids, awaited, report))

    async def _run(
        self,
        engine: str,
        ids: list[int],
        awaited: TransferView | None,
        report: Callable[[AnyEvent], None],
    ) -> None:
        salt = self._plan.prompt.cache_salt
        self.found_tokens = await self._leg.compute(engine, ids, salt, awaited)
        self._task = None
        report(DecodeWarmed())

    def end(self) -> None:
        """End it if it runs."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
