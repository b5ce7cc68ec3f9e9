"""Routing of a validated request: tokenise, call the driver, find the engines of its plan."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import NamedTuple

from prfaas.config.clusters import ClusterRole
from prfaas.core.admission.quotas import tokenising_cost
from prfaas.core.dispatch.types import Arrival, RefusalReason, RefusedRequest, Routed
from prfaas.core.kv.blocks import Layout
from prfaas.core.request.machine import Route
from prfaas.core.routing.decision import Path, Reason
from prfaas.errors import PrfaasError
from prfaas.gateway.admission.charging import reserve
from prfaas.gateway.engines.engine import Engine
from prfaas.gateway.http.errors import RejectedError, UnavailableError
from prfaas.gateway.loops.loops import PrefixReplication
from prfaas.gateway.openai.fields import bad
from prfaas.gateway.openai.requests import Api, ClientRequest
from prfaas.gateway.telemetry.live_parts import LiveParts
from prfaas.gateway.telemetry.request_records import RequestRecord
from prfaas.gateway.tenancy.tenants import Tenant
from prfaas.gateway.tokenization.prompt_encoder import EncodedPrompt, PromptMaker


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """One request with its tokens and its route."""

    arrival: Arrival
    prompt: EncodedPrompt
    route: Route

    @property
    def routed(self) -> Routed:
        """The decision."""
        return self.route.routed

    @property
    def layout(self) -> Layout | None:
        """Layout of the blocks; None while unknown, and then the path is local."""
        return self.arrival.layout


class Tokenised(NamedTuple):
    """A prompt, and the facts of the moment at which it was tokenised."""

    prompt: EncodedPrompt
    layout: Layout | None
    """Layout that its hashes were made for; None if no engine's is known."""
    max_model_len: int
    """Of the engine that would decode, tokens."""


ADAPTER = "its model is an adapter, whose KV blocks stay in the engine"


class Planner:
    """Decides where requests go.

    Args:
        copier: Counts misses of the PD cluster; None without replication.
    """

    def __init__(
        self, live: LiveParts, prompts: PromptMaker, copier: PrefixReplication | None = None
    ) -> None:
        self._live, self._prompts, self._copier = live, prompts, copier
        self._numbers = itertools.count()

    async def plan(
        self, client: ClientRequest, tenant: Tenant, record: RequestRecord
    ) -> RoutedPrompt:
        """Make the plan, and note the facts in `record`. The caller ends it with the driver.

        The prompt is charged to its tenant's limits; tokenising also if this raises.

        Raises:
            RequestError: The prompt cannot be rendered or is too long, or would come too late.
            UnavailableError: No PD engine is ready.
        """
        tokenised = await self.tokenise(client, tenant)
        record.tokenised(tokenised.prompt.num_tokens)
        prompt, arrival = tokenised.prompt, self.arrival(client, tenant, tokenised)
        names = self._live.records.names
        names.keep(record.request_id, record.tenant, prompt.hashes, arrival.quality)
        plan = self._decide(arrival, prompt, record)
        if client.is_for_adapter and plan.routed.decision.reason is Reason.NOT_OFFLOADABLE:
            record.explain(ADAPTER)
        num_tokens = prompt.num_tokens
        tenant.quota.count_tokens(num_tokens - tokenising_cost(num_tokens), time.monotonic_ns())
        longest = max(map(len, prompt.sequences))
        decode = self._live.engines.by_name[plan.route.decode]
        reserve(client, max(0, decode.max_model_len - longest), tenant, record)
        return plan

    async def tokenise(
        self, client: ClientRequest, tenant: Tenant, *, is_charged: bool = True
    ) -> Tokenised:
        """Render and tokenise a request.

        Raises:
            RequestError: The prompt cannot be rendered.
            UnavailableError: No PD engine is ready.
        """
        # Engines come and go while the prompt is tokenised: it is judged by the facts of now.
        if (facts := self.facts()) is None:
            raise self._live.engines.nobody()
        layout, max_model_len = facts
        # Blocks of an adapter lie in no pool, so nobody asks for their names.
        named = None if client.is_for_adapter else layout
        prompt = await self._prompts.prompt(
            client, tenant, named, max_model_len, is_charged=is_charged
        )
        return Tokenised(prompt, layout, max_model_len)

    def arrival(self, client: ClientRequest, tenant: Tenant, tokenised: Tokenised) -> Arrival:
        """Inputs for the routing of a request; RequestError if the prompt is too long."""
        prompt, layout, max_model_len = tokenised
        if client.is_exact:
            check_length(client, prompt, max_model_len)
        return Arrival(
            next(self._numbers),
            prompt.num_tokens,
            num_tokens_to_fit=max(map(len, prompt.sequences)) if client.is_exact else 0,
            offloadable=client.offloadable,
            shippable_tokens=None if layout is None else layout.last_boundary(prompt.num_tokens),
            tenant=tenant.name,
            may_ship=tenant.quota.may_ship(time.monotonic_ns()),
            layout=layout,
            streams=client.stream,
            hashes=prompt.hashes if len(prompt.sequences) == 1 else (),
            service=client.service,
            quality=tenant.quality_of(client.service),
        )

    def facts(self) -> tuple[Layout | None, int] | None:
        """Return the layout and the longest sequence, tokens, that prompts are made for; None if no
        PD engine is ready."""
        first = self._live.engines.choose(ClusterRole.PD)
        return None if first is None else (self._layout(first), first.max_model_len)

    def _layout(self, first: Engine) -> Layout | None:
        """Layout of an engine that decodes, of the first that is known."""
        others = (e for e in self._live.engines.by_name.values() if e.role is ClusterRole.PD)
        layouts = (self._live.pools.layout(engine.pool, engine.name) for engine in (first, *others))
        return next((layout for layout in layouts if layout is not None), None)

    def _decide(
        self, arrival: Arrival, prompt: EncodedPrompt, record: RequestRecord
    ) -> RoutedPrompt:
        found, considered = self._live.driver.route(arrival, time.monotonic_ns())
        reason = found.decision.reason
        if reason is Reason.LAYOUT_MISMATCH:
            detail = self._live.layouts.words()
        else:
            detail = self._live.driver.parts_behind(reason, considered.best.cluster.name)
        record.decided(found, considered, detail)
        if isinstance(found, RefusedRequest):
            raise _refused(found)
        if self._copier is not None:
            self._copier.routed(arrival, found, considered, time.monotonic_ns())
        decode = self._decoder(arrival, found)
        record.decode_on(decode, is_asked=False)
        apart = found.prefill != decode and self._is_shared(arrival, found)
        prefill = found.prefill if apart else ""
        pool_of = {name: self._live.engines.by_name[name].pool for name in (decode, found.prefill)}
        route = Route(
            number=arrival.request_id,
            routed=found,
            decode=decode,
            prefill=prefill,
            pools=(pool_of[prefill or decode], pool_of[decode]),
            final_tokens=arrival.shippable_tokens or 0,
            deadline_ns=record.deadline_ns,
            holds=arrival.layout is not None and not arrival.layout.takes_orders,
        )
        return RoutedPrompt(arrival, prompt, route)

    def _decoder(self, arrival: Arrival, found: Routed) -> str:
        name = found.decode or self._live.driver.choose_decode(arrival.request_id)
        if name is None:
            self._live.driver.end(arrival.request_id, time.monotonic_ns())
            raise UnavailableError("no engine of a PD cluster can decode; try again")
        return name

    def _is_shared(self, arrival: Arrival, found: Routed) -> bool:
        """Return True if two engines share the work: at home only where there are blocks to hand
        over."""
        shippable = arrival.shippable_tokens
        if found.decision.path is Path.REMOTE:
            return True
        if arrival.offloadable and arrival.hashes and (shippable or 0) > found.present_tokens:
            return True
        self._live.driver.fall_back(arrival.request_id, time.monotonic_ns())
        return False


def _refused(found: RefusedRequest) -> PrfaasError:
    if found.reason is RefusalReason.NO_INSTANCE:
        return UnavailableError("no engine of a PD cluster can take this request; try again")
    return RejectedError(
        "the first token is predicted to come too late; the gateway accepts only requests that "
        f"it can serve in time; try again in {found.retry_after_s} s",
        found.reason.value,
        found.retry_after_s,
    )


def check_length(client: ClientRequest, prompt: EncodedPrompt, max_model_len: int) -> None:
    """Refuse what does not fit into the model.

    Raises:
        RequestError: 400, with the numbers.
    """
    param = "messages" if client.api is Api.CHAT else "prompt"
    num_tokens = max(len(sequence) for sequence in prompt.sequences)
    limit = f"This model's maximum context length is {max_model_len} tokens."
    if num_tokens >= max_model_len:
        raise bad(f"{limit} However, the prompt has {num_tokens} tokens. Shorten it.", param)
    if client.max_tokens is not None and client.max_tokens > max_model_len:
        raise bad(
            f"{limit} However, {client.max_tokens_field} is {client.max_tokens}. Reduce it.",
            client.max_tokens_field,
        )
