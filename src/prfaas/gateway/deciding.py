"""From a checked request to a plan: tokenise, look at the caches, ask the policy, pick engines."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.config.deployment import ClusterRole
from prfaas.core.blocks import Layout
from prfaas.core.prefix_index import PrefixIndex
from prfaas.core.routing import Decision, Path, Reason, RoutingFacts, ThresholdPolicy
from prfaas.errors import PrfaasError
from prfaas.gateway.engines import Engine, Engines
from prfaas.gateway.fields import bad
from prfaas.gateway.pools import Pools
from prfaas.gateway.records import Record
from prfaas.gateway.requests import Api, ClientRequest
from prfaas.gateway.tokenizing import Prompt, PromptMaker


class UnavailableError(PrfaasError):
    """Nobody can serve this now; later somebody may: 503."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Who does what for one request.

    Attributes:
        client: The request.
        prompt: Its token ids.
        decision: The path and why.
        decode: Engine in the PD cluster.
        prefill: Engine in the PrfaaS cluster; None on the local path.
        pd_hit_tokens: Prefix that the decode engine's pool already holds.
        final_tokens: Prefix that it will hold once the transfer is complete.
        layout: Of the decode engine's blocks; None while unknown, and then the path is local.
    """

    client: ClientRequest
    prompt: Prompt
    decision: Decision
    decode: Engine
    prefill: Engine | None
    pd_hit_tokens: int
    final_tokens: int
    layout: Layout | None


class Planner:
    """Decides where requests go.

    Args:
        engines: Who is ready.
        pools: Their layouts and links.
        index: What their caches hold.
        prompts: Tokenises.
        policy: The rule.
    """

    def __init__(
        self,
        engines: Engines,
        pools: Pools,
        index: PrefixIndex,
        prompts: PromptMaker,
        policy: ThresholdPolicy,
    ) -> None:
        self._engines = engines
        self._pools = pools
        self._index = index
        self._prompts = prompts
        self._policy = policy

    async def plan(self, client: ClientRequest, record: Record) -> Plan:
        """Make the plan, and note the facts in `record`.

        Raises:
            RequestError: The prompt can not be rendered or is too long.
            UnavailableError: No PD engine is ready.
        """
        decode = self._engines.choose(ClusterRole.PD)
        if decode is None:
            raise UnavailableError("no engine of a PD cluster is ready; try again")
        max_model_len = decode.max_model_len
        layout = self._pools.layout(decode.pool, decode.name)
        prompt = await self._prompts.prompt(client, layout, max_model_len)
        record.num_prompt_tokens = prompt.num_tokens
        if client.is_exact:
            check_length(client, prompt, max_model_len)
        return self._decide(client, prompt, decode, layout, record)

    def _decide(
        self,
        client: ClientRequest,
        prompt: Prompt,
        decode: Engine,
        layout: Layout | None,
        record: Record,
    ) -> Plan:
        prefill = self._engines.choose(ClusterRole.PRFAAS, longer_than=prompt.num_tokens)
        record.pd_hit_tokens = self._hit(decode.pool, layout, prompt)
        record.prfaas_hit_tokens = max(
            (self._hit(pool, layout, prompt) for pool in self._prfaas_pools()), default=0
        )
        final_tokens = layout.last_boundary(prompt.num_tokens) if layout else 0
        # Without a whole block beyond what is there, nothing could be shipped.
        nothing_to_ship = layout is not None and final_tokens <= record.pd_hit_tokens
        facts = RoutingFacts(
            num_prompt_tokens=prompt.num_tokens,
            pd_hit_tokens=record.pd_hit_tokens,
            prfaas_hit_tokens=record.prfaas_hit_tokens,
            obstacle=Reason.NOT_OFFLOADABLE
            if nothing_to_ship or not client.offloadable
            else self._obstacle(prefill, decode, layout),
        )
        decision = self._policy.decide(facts)
        record.decision, record.decode_engine = decision, decode.name
        return Plan(
            client=client,
            prompt=prompt,
            decision=decision,
            decode=decode,
            prefill=prefill if decision.path is Path.REMOTE else None,
            pd_hit_tokens=record.pd_hit_tokens,
            final_tokens=final_tokens,
            layout=layout,
        )

    def _obstacle(
        self, prefill: Engine | None, decode: Engine, layout: Layout | None
    ) -> Reason | None:
        if prefill is None:
            return Reason.NO_PREFILL_INSTANCE
        if not self._layouts_agree(prefill, layout):
            return Reason.LAYOUT_MISMATCH
        return None if self._link_up(prefill, decode, layout) else Reason.LINK_DOWN

    def _hit(self, pool: str, layout: Layout | None, prompt: Prompt) -> int:
        """Cached prefix of a single prompt; several prompts count as uncached."""
        if layout is None or len(prompt.sequences) > 1:
            return 0
        return self._index.usable_hit(pool, layout, prompt.hashes, prompt.num_tokens)

    def _prfaas_pools(self) -> set[str]:
        engines = self._engines.by_name.values()
        return {engine.pool for engine in engines if engine.role is ClusterRole.PRFAAS}

    def _link_up(self, prefill: Engine | None, decode: Engine, layout: Layout | None) -> bool:
        """Without a layout nobody can name the blocks, which is no better than no link."""
        if prefill is None or layout is None:
            return False
        announced = self._pools.layout(prefill.pool, prefill.name) is not None
        return announced and self._pools.link_up(prefill.pool, decode.pool)

    def _layouts_agree(self, prefill: Engine | None, layout: Layout | None) -> bool:
        """Unknown layouts do not disagree: then the link is what is missing."""
        theirs = self._pools.layout(prefill.pool, prefill.name) if prefill else None
        if theirs is None or layout is None:
            return True
        return theirs.layout_id == layout.layout_id


def check_length(client: ClientRequest, prompt: Prompt, max_model_len: int) -> None:
    """Refuse what does not fit into the model.

    Raises:
        RequestError: 400, with the numbers.
    """
    param = "messages" if client.api is Api.CHAT else "prompt"
    num_tokens = max(len(sequence) for sequence in prompt.sequences)
    limit = f"This model's maximum context length is {max_model_len} tokens."
    if num_tokens >= max_model_len:
        raise bad(f"{limit} However, the prompt has {num_tokens} tokens. Shorten it.", param)
    if client.max_tokens is not None and num_tokens + client.max_tokens > max_model_len:
        raise bad(
            f"{limit} However, {client.max_tokens_field} is {client.max_tokens} and the prompt has "
            f"{num_tokens} tokens: {num_tokens + client.max_tokens} in all. Reduce either.",
            client.max_tokens_field,
        )
