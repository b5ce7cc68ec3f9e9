"""The prefill leg: one POST with the order for the engine's tier, its rehearsal, and transfers of
one request between the pools at both ends.

An API server refuses requests that a prefill leg, which carries a prompt and nothing else, never
shows it: tools without a parser, several greedy choices, a grammar that does not compile. Such a
request is rehearsed before anything is shipped: sent to the engine that will decode, with a prompt
of one token and an answer of one. If it is refused, the request itself goes there without a remote
prefill, so that the client gets the engine's own words.

References:
    vLLM 0.32: `sampling_params.py` (`_verify_args`, `verify`), `v1/engine/input_processor.py`,
    `entrypoints/openai/chat_completion/protocol.py` and `completion/protocol.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import aiohttp
from aiohttp import web

from prfaas.config.routing import RoutingTable
from prfaas.core.kv.blocks import Layout
from prfaas.core.kv.shipping import MANIFEST_BYTES_MAX, CheckpointRule, manifest_of, shipped_bytes
from prfaas.core.request.events import AnyEvent, Blocks, PoolLost, PrefillFailure, TransferEnded
from prfaas.core.transfer.tickets import Prefix
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.errors import EngineError
from prfaas.gateway.engines.engine import (
    INTERNAL_ERROR,
    Engine,
    EngineUnreachableError,
    SuspectError,
)
from prfaas.gateway.engines.engine_client import Engines
from prfaas.gateway.http.json_codec import JsonObject, as_object, from_json, to_json
from prfaas.gateway.http.responses import AnswerTooLongError, read_answer
from prfaas.gateway.openai.continuing import GREEDY_BELOW, first_of
from prfaas.gateway.openai.fields import Trait, fields_with
from prfaas.gateway.openai.requests import ClientRequest
from prfaas.gateway.pools.pool_client import Pools
from prfaas.gateway.pools.transfer_orders import Fetcher, NotAsked, TicketOffice
from prfaas.gateway.routing.transfer_tracker import Transfers, TransferView
from prfaas.gateway.serving.decode_leg import LegBrokenError
from prfaas.gateway.serving.first_token import TELL_IDS, EarlyToken, cached_in
from prfaas.gateway.serving.leg_requests import (
    COMPLETIONS_PATH,
    decode_body,
    prefill_body,
    wait_order,
)
from prfaas.gateway.serving.request_state import Exchange
from prfaas.gateway.serving.routing_step import RoutedPrompt
from prfaas.gateway.tokenization.prompt_encoder import EncodedPrompt
from prfaas.units import NS_PER_MS
from prfaas.wire.frames import TRANSFER_ID_BYTES
from prfaas.wire.messages.link import Ahead, all_computed

_Why = PrefillFailure
T = TypeVar("T")


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


class FieldsRefusedError(PrefillGivenUpError):
    """The engine does not take the fields of this request."""


_FIELDS_REFUSED = (400, 422)


@dataclass(frozen=True, slots=True)
class PrefillLeg:
    """Runs prefill legs."""

    engines: Engines
    model: str
    limits: RoutingTable
    tickets: TicketOffice
    checkpoints: CheckpointRule
    refusing: dict[str, float] = field(default_factory=dict)
    """Until when an engine is given prompts alone, seconds, by its name."""

    async def run(
        self,
        plan: RoutedPrompt,
        engine: Engine,
        transfer: TransferView | None,
        headers: Mapping[str, str],
        awaited: TransferView | None = None,
        early: EarlyToken | None = None,
    ) -> int | web.StreamResponse:
        """Compute the prompt's KV cache on `engine` and have it pushed.

        Args:
            transfer: To the pool of the engine that decodes; None if nothing is to be decoded.
            awaited: A prefix in transit to `engine`.
            early: Takes the token of the leg as the first one of the answer; None for nobody.

        Returns:
            Prompt tokens that were cached over there; the answer if it has no further token.

        Raises:
            PrefillGivenUpError: Any failure.
        """
        if plan.route.holds:
            order = None
        elif transfer is None:
            order = wait_order(awaited, self.limits.transfer_timeout // NS_PER_MS)
        else:
            order = self._order(plan, transfer, awaited)
        if early is not None:
            client = first_of(early.exchange.client, early.num_tokens)
            length = plan.prompt.num_tokens + early.num_tokens
            path, body = decode_body(client, plan.prompt, max_model_len=length, transfer=order)
            try:
                return await self._post(engine, path, body | TELL_IDS, headers, early.read)
            except FieldsRefusedError:
                self.refusing[engine.name] = time.monotonic() + REFUSED_S
                if transfer is None:
                    raise
        body = prefill_body(self.model, plan.prompt, order)
        return await self._post(engine, COMPLETIONS_PATH, body, headers, _cached_tokens)

    def takes_sampling(self, engine: Engine) -> bool:
        """Return False if an engine lately refused a prompt with the fields of a client, as the
        proxy of a shared engine does."""
        return self.refusing.get(engine.name, 0.0) <= time.monotonic()

    async def compute(
        self,
        engine: str,
        token_ids: Sequence[int],
        cache_salt: str,
        awaited: TransferView | None = None,
    ) -> int | None:
        """Compute a prompt without a hand-off.

        Args:
            awaited: Blocks in transit to `engine`.

        Returns:
            Prompt tokens that were cached; None if the engine does not compute it.
        """
        order = wait_order(awaited, self.limits.transfer_timeout // NS_PER_MS)
        body = prefill_body(self.model, EncodedPrompt([token_ids], [], cache_salt), order)
        try:
            to = self.engines.by_name[engine]
            return await self._post(to, COMPLETIONS_PATH, body, {}, _cached_tokens)
        except (KeyError, PrefillGivenUpError):
            return None

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

    async def _post(
        self,
        engine: Engine,
        path: str,
        body: JsonObject,
        headers: Mapping[str, str],
        read: Callable[[aiohttp.ClientResponse], Awaitable[T]],
    ) -> T:
        try:
            async with self.engines.post(engine, path, body, headers) as response:
                status = response.status
                if status == 200:
                    return await read(response)
                await read_answer(response)
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
        except ValueError:
            raise PrefillGivenUpError(_Why.BAD_ANSWER, "the answer is no JSON") from None
        except LegBrokenError as error:
            if error.reason == "broken":
                raise PrefillGivenUpError(_Why.BROKEN, str(error), may_have_died=True) from None
            status = error.status
        label = PrefillFailure.of_status(status)
        kind = PrefillFailedError if status == INTERNAL_ERROR else PrefillGivenUpError
        if status in _FIELDS_REFUSED:
            kind = FieldsRefusedError
        answers = f"{engine.name} answers {status}"
        raise kind(label, answers, may_have_died=status == INTERNAL_ERROR)


async def _cached_tokens(response: aiohttp.ClientResponse) -> int:
    return cached_in(as_object(from_json(await read_answer(response))))


@dataclass(frozen=True, slots=True)
class Movers:
    """Services that move blocks for all requests."""

    pools: Pools
    transfers: Transfers
    fetcher: Fetcher


class MovingBlocks:
    """The transfers of one request."""

    def __init__(
        self, movers: Movers, exchange: Exchange, report: Callable[[AnyEvent], None]
    ) -> None:
        self._movers, self._exchange, self._report = movers, exchange, report
        self._views: dict[Blocks, TransferView] = {}
        self.all: list[tuple[Blocks, TransferView]] = []
        """All transfers that were begun, those of prefills that were given up included."""
        self._whole_bytes = 0
        """Bytes of all blocks of the hand-off; 0 if unknown."""

    def get(self, blocks: Blocks | None) -> TransferView | None:
        """Transfer of some blocks; None without one."""
        return None if blocks is None else self._views.get(blocks)

    def open(self, blocks: Blocks, source: str, destination: str) -> TransferView:
        """Begin a transfer, or a hand-over within a pool, of which no pool reports an end."""
        transfer_id = secrets.token_bytes(TRANSFER_ID_BYTES)
        if blocks in self._views:
            # Of a prefill that was given up.
            self._movers.transfers.close(self._views[blocks])
        report = partial(self._ended, blocks)
        view = self._movers.transfers.open(transfer_id, source, destination, report)
        self._views[blocks] = view
        self.all.append((blocks, view))
        if not view.stays:
            record = self._exchange.record
            record.ships_by(view)
            view.trace = self._exchange.trace.of_transfer(record)
            view.service = record.service
        return view

    def charge(self, plan: RoutedPrompt, layout: Layout | None, final_tokens: int) -> None:
        """Charge blocks of a prefix that come from a PrfaaS cluster on their tenant's limit."""
        if layout is not None:
            have = plan.routed.present_tokens
            num_bytes = shipped_bytes(layout, have_tokens=have, final_tokens=final_tokens)
            self._exchange.record.allowed(num_bytes)
            self._exchange.tenant.quota.ship(num_bytes, time.monotonic_ns())

    def fetch(self, plan: RoutedPrompt) -> bool:
        """Have the prefix fetched that a route counts on; False if its pool cannot be asked."""
        routed, layout = plan.routed, plan.layout
        assert layout is not None  # noqa: S101 (nothing is pulled without one)
        hashes = plan.arrival.hashes[: routed.hit_tokens // layout.tokens_per_hash]
        view = self.open(Blocks.PULL, *routed.pull_link)
        prefix = Prefix(layout, hashes, plan.arrival.tenant, plan.arrival.quality)
        is_asked = not self._movers.fetcher.fetch(view, prefix, routed.prefill_pool_tokens)
        if not is_asked:
            del self._views[Blocks.PULL]
        return is_asked

    def expect(self, plan: RoutedPrompt) -> None:
        """Note which blocks a hand-off has to bring."""
        self._whole_bytes = self.num_bytes(plan)

    @staticmethod
    def num_bytes(plan: RoutedPrompt) -> int:
        """Bytes of a hand-off, those of further checkpoints not counted; 0 is unknown."""
        if plan.layout is None:
            return 0
        have, final = plan.routed.present_tokens, plan.route.final_tokens
        return shipped_bytes(plan.layout, have_tokens=have, final_tokens=final)

    def follow(self, plan: RoutedPrompt, view: TransferView) -> NotAsked | None:
        """Have the blocks of a hand-off fetched as an engine without orders stores them.

        Returns:
            Reason why they cannot be; None if they are.
        """
        layout = plan.layout
        assert layout is not None  # noqa: S101 (it is what takes no orders)
        if view.stays:
            return None
        hashes = plan.arrival.hashes[: plan.route.final_tokens // layout.tokens_per_hash]
        prefix = Prefix(layout, hashes, plan.arrival.tenant, plan.arrival.quality)
        have_tokens = plan.routed.present_tokens
        return self._movers.fetcher.fetch(view, prefix, have_tokens, Ahead.COMPUTING)

    def computed(self, blocks: Blocks) -> None:
        """Report that the engine has answered whose blocks are followed."""
        if (view := self._views.get(blocks)) is not None and blocks is Blocks.HAND_OFF:
            self._movers.pools.send(view.destination, all_computed(view.transfer_id, view.source))

    def abort(self, blocks: Blocks, why: str) -> None:
        """End a transfer at both pools; nothing happens if it has not begun."""
        if blocks in self._views:
            self._views[blocks].is_given_up = True
            self._movers.pools.abort(self._views[blocks], why)

    def release(self, blocks: Blocks) -> None:
        """Report that no request waits for these blocks any more."""
        if blocks in self._views:
            self._movers.pools.release(self._views[blocks])

    def close(self) -> None:
        """The request is over: nothing of it is kept by its transfers, which are remembered."""
        self._report = lambda _: None
        for view in self._views.values():
            self._movers.transfers.close(view)

    def _ended(self, blocks: Blocks, kind: TransferEnd | None, at_destination: bool) -> None:
        if kind is None:
            self._report(PoolLost(blocks))
        else:
            num_bytes = self._views[blocks].num_bytes if at_destination else 0
            is_whole = kind is TransferEnd.COMMITTED and 0 < self._whole_bytes <= num_bytes
            is_whole = is_whole and blocks is Blocks.HAND_OFF
            self._report(TransferEnded(blocks, kind, at_destination, num_bytes, is_whole))


PASSED_MAX = 1024
"""Combinations of fields that are remembered to be taken."""
UNKNOWN_MAX = 1024
NUM_CHOICES = 2
"""More than one choice is refused, or is not, whatever their number."""
REFUSED_S = 60.0
"""Time for which an engine that refused the fields of a client gets prompts alone."""
_UNSEEN, _RENDERED = fields_with(Trait.OURS), fields_with(Trait.TEMPLATE)
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
}
"""Values of which vLLM takes every one."""


class Rehearsal:
    """Asks engines whether they take requests; what they took once is not asked again.

    Args:
        count: Called with the outcome: "passed", "refused", "unknown", or "skipped" where the
            engine did not answer another one lately.
        limit_s: An engine that does not answer by then is taken to agree.
        pause_s: For this time such an engine is not asked again by the same tenant.
    """

    def __init__(
        self, engines: Engines, count: Callable[[str], None], limit_s: float, pause_s: float
    ) -> None:
        self._engines, self._count = engines, count
        self._limit_s, self._pause_s = limit_s, pause_s
        self._passed: OrderedDict[bytes, None] = OrderedDict()
        self._unknown: OrderedDict[tuple[str, str], float] = OrderedDict()
        """By engine and tenant's salt, until when it is not asked."""

    async def is_refused(self, exchange: Exchange, plan: RoutedPrompt) -> bool:
        """Return True if the engine that would decode a request does not take it."""
        client = exchange.client
        if is_plain(client):
            return False
        key = _key(client, plan.prompt.cache_salt)
        if key in self._passed:
            self._passed.move_to_end(key)
            return False
        unheard = (plan.route.decode, plan.prompt.cache_salt)
        if self._unknown.get(unheard, 0.0) > time.monotonic():
            self._count("skipped")
            return False
        status = await self._ask(exchange, plan)
        if status is None or status >= 500:
            self._count("unknown")
            self._remember_unknown(unheard)
            return False
        if status >= 400:
            self._count("refused")
            return True
        self._count("passed")
        self._passed[key] = None
        if len(self._passed) > PASSED_MAX:
            self._passed.popitem(last=False)
        return False

    def _remember_unknown(self, unheard: tuple[str, str]) -> None:
        self._unknown[unheard] = time.monotonic() + self._pause_s
        self._unknown.move_to_end(unheard)
        if len(self._unknown) > UNKNOWN_MAX:
            self._unknown.popitem(last=False)

    async def _ask(self, exchange: Exchange, plan: RoutedPrompt) -> int | None:
        """Status of a rehearsal; None without an answer."""
        path, body = rehearsed(exchange.client, plan)
        decode, headers = self._engines.by_name[plan.route.decode], exchange.leg_headers("v")
        try:
            async with (
                asyncio.timeout(self._limit_s),
                self._engines.post(decode, path, body, headers) as response,
            ):
                await read_answer(response)
                return response.status
        except (TimeoutError, EngineError, aiohttp.ClientError):
            return None


def is_plain(client: ClientRequest) -> bool:
    """Return True if every engine is known to accept the fields of a request."""
    if client.by_chat_endpoint:
        return False
    body = client.body
    for name, value in body.items():
        if value is None or name in _UNSEEN or name in _RENDERED:
            continue
        if name == "n":
            if value > 1 and (body.get("temperature") or 0.0) < GREEDY_BELOW:
                return False
        elif name == "stop":
            if "" in ([value] if isinstance(value, str) else value):
                return False
        elif name not in _RANGES or not _RANGES[name][0] <= value <= _RANGES[name][1]:
            return False
    return True


def rehearsed(client: ClientRequest, plan: RoutedPrompt) -> tuple[str, JsonObject]:
    """Path and body of a request with a prompt and an answer of one token."""
    prompt = replace(plan.prompt, sequences=[[plan.prompt.token_ids[0]]], hashes=[])
    path, body = decode_body(client, prompt, max_model_len=prompt.num_tokens + 1, transfer=None)
    for name in ("stream", "stream_options", "max_completion_tokens", *_RENDERED):
        body.pop(name, None)
    if "messages" in body:
        body["messages"] = [{"role": "user", "content": "."}]
    body["max_tokens"] = 1
    least = body.pop("min_tokens", None)
    if least is not None and client.max_tokens is not None and least > client.max_tokens:
        body["min_tokens"] = 2
    if client.num_choices > 1:
        body["n"] = NUM_CHOICES
    return path, body


def _key(client: ClientRequest, cache_salt: str) -> bytes:
    """Digest of what a rehearsal depends on, by tenant."""
    told = {name: value for name, value in client.body.items() if name not in _UNSEEN}
    shape = [client.api.value, client.by_chat_endpoint, cache_salt, told]
    return hashlib.blake2b(to_json(shape), digest_size=16).digest()
