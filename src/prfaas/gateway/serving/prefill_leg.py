"""The prefill leg: one POST, with the order for the engine's tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from prfaas.config.routing import RoutingTable
from prfaas.core.kv.blocks import Layout
from prfaas.core.kv.shipping import MANIFEST_BYTES_MAX, CheckpointRule, manifest_of
from prfaas.core.request.events import PrefillFailure
from prfaas.errors import EngineError
from prfaas.gateway.engines.engine import (
    INTERNAL_ERROR,
    Engine,
    EngineUnreachableError,
    SuspectError,
)
from prfaas.gateway.engines.engine_client import Engines
from prfaas.gateway.http.answer_limits import AnswerTooLongError, read_answer
from prfaas.gateway.http.json_codec import JsonObject, as_count, as_object, from_json
from prfaas.gateway.pools.ticket_issuer import TicketOffice
from prfaas.gateway.routing.transfer_tracker import TransferView
from prfaas.gateway.serving.leg_requests import COMPLETIONS_PATH, prefill_body, wait_order
from prfaas.gateway.serving.routing_step import RoutedPrompt
from prfaas.gateway.tokenization.prompt_encoder import EncodedPrompt
from prfaas.units import NS_PER_MS

_Why = PrefillFailure


class PrefillGivenUpError(EngineError):
    """The prefill did not happen.

    Attributes:
        may_have_died: True if the engine had the prompt, and may have ended over it.
    """

    def __init__(self, kind: PrefillFailure, message: str, *, may_have_died: bool = False) -> None:
        super().__init__(message)
        self.kind, self.may_have_died = kind, may_have_died


class PrefillFailedError(PrefillGivenUpError, SuspectError):
    """The engine reported a failure of this request."""


@dataclass(frozen=True, slots=True)
class PrefillLeg:
    """Runs prefill legs."""

    engines: Engines
    model: str
    limits: RoutingTable
    tickets: TicketOffice
    checkpoints: CheckpointRule

    async def run(
        self,
        plan: RoutedPrompt,
        engine: Engine,
        transfer: TransferView,
        headers: Mapping[str, str],
        awaited: TransferView | None = None,
    ) -> int:
        """Compute the prompt's KV cache on `engine` and have it pushed.

        Args:
            transfer: To the pool of the engine that decodes.
            awaited: A prefix in transit to `engine`.

        Returns:
            Prompt tokens that were cached over there.

        Raises:
            PrefillGivenUpError: Any failure.
        """
        order = None if plan.route.holds else self._order(plan, transfer, awaited)
        body = prefill_body(self.model, plan.prompt, order)
        return await self._post(engine, body, headers)

    async def compute(self, engine: str, token_ids: Sequence[int], cache_salt: str) -> bool:
        """Compute a prompt without a transfer; False if the engine does not."""
        body = prefill_body(self.model, EncodedPrompt([token_ids], [], cache_salt), None)
        try:
            await self._post(self.engines.by_name[engine], body, {})
        except (KeyError, PrefillGivenUpError):
            return False
        return True

    def layout_of(self, plan: RoutedPrompt) -> Layout | None:
        """Layout of a hand-off, which may ship checkpoints; nothing else does."""
        have, final = plan.routed.present_tokens, plan.route.final_tokens
        layout = plan.layout
        return layout and self.checkpoints.of(layout, have_tokens=have, final_tokens=final)

    def _order(
        self, plan: RoutedPrompt, transfer: TransferView, awaited: TransferView | None
    ) -> JsonObject:
        """Instructions for the engine's tier and the pools."""
        if (layout := self.layout_of(plan)) is None:
            raise PrefillGivenUpError(_Why.NO_LAYOUT, "no engine has announced a layout")
        span = {"have_tokens": plan.routed.present_tokens, "final_tokens": plan.route.final_tokens}
        order = {"transfer": transfer.transfer_id.hex(), "push_to": transfer.destination, **span}
        if layout.checkpoint_tokens:
            order["checkpoint_tokens"] = layout.checkpoint_tokens
        if awaited is not None:
            order["wait"] = wait_order(awaited, self.limits.transfer_timeout // NS_PER_MS)
        if transfer.stays:
            return order
        blocks = manifest_of(layout, plan.arrival.hashes, **span)
        if sum(map(len, blocks.values())) > MANIFEST_BYTES_MAX:
            raise PrefillGivenUpError(
                _Why.TOO_MANY_BLOCKS, "the prompt has more blocks than a ticket can name"
            )
        ticket = self.tickets.issue(
            transfer, layout, plan.arrival.tenant, blocks, **span, quality=plan.arrival.quality
        )
        return {**order, "ticket": ticket}

    async def _post(self, engine: Engine, body: JsonObject, headers: Mapping[str, str]) -> int:
        try:
            async with self.engines.post(engine, COMPLETIONS_PATH, body, headers) as response:
                status, answer = response.status, await read_answer(response)
        except EngineUnreachableError as error:
            raise PrefillGivenUpError(
                _Why.UNREACHABLE, str(error), may_have_died=error.had_request
            ) from None
        except AnswerTooLongError as error:
            raise PrefillGivenUpError(_Why.BAD_ANSWER, str(error)) from None
        except aiohttp.ClientError as error:
            raise PrefillGivenUpError(
                _Why.BROKEN, f"{type(error).__name__}", may_have_died=True
            ) from None
        if status != 200:
            label = PrefillFailure.of_status(status)
            kind = PrefillFailedError if status == INTERNAL_ERROR else PrefillGivenUpError
            answers = f"{engine.name} answers {status}"
            raise kind(label, answers, may_have_died=status == INTERNAL_ERROR)
        return _cached_tokens(answer)


def _cached_tokens(answer: bytes) -> int:
    try:
        usage = as_object(as_object(from_json(answer)).get("usage"))
    except ValueError:
        raise PrefillGivenUpError(_Why.BAD_ANSWER, "the answer is no JSON") from None
    return as_count(as_object(usage.get("prompt_tokens_details")).get("cached_tokens"))
