"""Questions about a prompt: its hits in pools and engines (`/kv/lookup`), and its token ids as the
engines compute them, in vLLM's form (`/tokenize`, `/detokenize`).

Asking changes nothing: no request is booked, nothing is sent. The prompt is never echoed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from dataclasses import dataclass

from aiohttp import web

from prfaas.config.clusters import ClusterRole, ClusterTable
from prfaas.core.dispatch.types import Arrival, RefusedRequest, Routed
from prfaas.core.kv.blocks import GroupKind
from prfaas.core.kv.prefix_index import Tier
from prfaas.core.kv.source_sets import Hits
from prfaas.errors import RequestError
from prfaas.gateway.api.auth import TENANT, RequestAdmission
from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.http.request_body import read
from prfaas.gateway.http.responses import json_response
from prfaas.gateway.openai.fields import bad, shown
from prfaas.gateway.openai.requests import Api, check_model, parse_object, parse_request, token_ids
from prfaas.gateway.serving.routing_step import Planner
from prfaas.gateway.telemetry.live_parts import LiveParts
from prfaas.gateway.telemetry.request_records import decision_json
from prfaas.gateway.tenancy.tenants import Tenant, Tenants
from prfaas.gateway.tokenization.prompt_encoder import PromptMaker


@dataclass(frozen=True, slots=True)
class TokenApi:
    """Serves both. They count as requests of their tenant; of the tokens, a sixteenth counts."""

    live: LiveParts
    prompts: PromptMaker
    request_admission: RequestAdmission

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        router.add_post("/tokenize", self._tokenize)
        router.add_post("/detokenize", self._detokenize)

    async def _tokenize(self, request: web.Request) -> web.Response:
        with self.request_admission.enter(request[TENANT]):
            body = await read(request, parse_object)
            tenant = request[TENANT]
            ids, max_model_len = await self._ids(body, tenant)
            wants_words = body.get("return_token_strs") is True
            words = (await self.prompts.words(ids, tenant))[1] if wants_words else None
        return json_response(
            {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": words}
        )

    async def _ids(self, body: JsonObject, tenant: Tenant) -> tuple[list[int], int]:
        api = Api.CHAT if "messages" in body else Api.COMPLETIONS
        if api is Api.COMPLETIONS and not isinstance(body.get("prompt"), str):
            raise bad(f"prompt must be a string, got {shown(body.get('prompt'))}", "prompt")
        vocab_size, rules = self.prompts.vocab_size, tenant.rules
        adapters = self.live.engines.adapters()
        client = parse_request(
            body, api, self.live.deployment.model.name, vocab_size, rules=rules, adapters=adapters
        )
        if not client.is_exact:
            raise bad("only text is tokenised here, and it is not truncated", "messages")
        engine = self.live.engines.choose(ClusterRole.PD)
        if engine is None:
            raise self.live.engines.nobody()
        max_model_len = engine.max_model_len
        prompt = await self.prompts.prompt(client, tenant, None, max_model_len)
        return list(prompt.token_ids), max_model_len

    async def _detokenize(self, request: web.Request) -> web.Response:
        with self.request_admission.enter(request[TENANT]):
            body = await read(request, parse_object)
            check_model(body, self.live.deployment.model.name, self.live.engines.adapters())
            ids = token_ids(body.get("tokens"), self.prompts.vocab_size, "tokens")
            text, _ = await self.prompts.words(ids, request[TENANT])
        return json_response({"prompt": text})


POOL_TIERS = Tier.HOST | Tier.DISK


@dataclass(frozen=True, slots=True)
class KvLookup:
    """Answers it."""

    live: LiveParts
    planner: Planner
    tenants: Tenants
    followed: Callable[[], Container[str]]
    """Engines whose KV events are followed."""
    vocab_size: int
    """Token ids that the model knows."""

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        router.add_get("/kv/lookup", self._get)
        router.add_post("/kv/lookup", self._post)

    async def _get(self, request: web.Request) -> web.Response:
        prompt = request.query.get("prompt", "")
        if not prompt:
            raise RequestError("use ?prompt=TEXT, or POST a body as for /v1/completions")
        return await self._answer(request, {"prompt": prompt})

    async def _post(self, request: web.Request) -> web.Response:
        return await self._answer(request, await read(request, parse_object))

    async def _answer(self, request: web.Request, body: JsonObject) -> web.Response:
        tenant = self._tenant(request.query.get("tenant"))
        api = Api.CHAT if "messages" in body else Api.COMPLETIONS
        model = self.live.deployment.model.name
        client = parse_request(
            {"model": model} | body, api, model, self.vocab_size, rules=tenant.rules
        )
        tokenised = await self.planner.tokenise(client, tenant, is_charged=False)
        return json_response(self._found(self.planner.arrival(client, tenant, tokenised)))

    def _tenant(self, name: str | None) -> Tenant:
        known = self.tenants.by_name
        if name is None and len(known) == 1:
            name = next(iter(known))
        if name not in known:
            shown = "none" if name is None else repr(name[:64])
            raise RequestError(
                f"?tenant is {shown}, but has to be one of {', '.join(known)}: every tenant's "
                "blocks have names of their own",
                param="tenant",
            )
        return known[name]

    def _found(self, arrival: Arrival) -> JsonObject:
        hits, hints = self.live.driver.cached(arrival)
        asked = arrival._replace(hits=hits, hints=hints)
        found = self.live.driver.dispatcher.foresee(asked, time.monotonic_ns())
        layout = arrival.layout
        return {
            "num_prompt_tokens": arrival.num_prompt_tokens,
            "usable_tokens_max": arrival.shippable_tokens,
            "layout_id": layout.layout_id.hex() if layout else None,
            "clusters": [
                {
                    "cluster": name,
                    "role": table.role.value,
                    "pools": [
                        self._source(arrival, pool, POOL_TIERS, hits, hints) for pool in table.pools
                    ],
                    "engines": self._engines(arrival, table, hits, hints),
                }
                for name, table in self.live.deployment.clusters.items()
            ],
            "decision": _foreseen(found),
        }

    def _engines(
        self, arrival: Arrival, table: ClusterTable, hits: Hits, hints: Hits
    ) -> list[JsonObject]:
        return [
            self._source(arrival, name, Tier.DEVICE, hits, hints) | {"pool": engine.pool}
            if name in self.followed()
            else {"name": name, "tiers": ["device"], "state": "not_followed", "pool": engine.pool}
            for name, engine in table.engines.items()
        ]

    def _source(
        self, arrival: Arrival, name: str, tiers: Tier, hits: Hits, hints: Hits
    ) -> JsonObject:
        return {
            "name": name,
            "tiers": [str(tier.name).lower() for tier in tiers],
            "state": self.live.driver.index.state(name).value,
            "num_blocks_known": self.live.driver.index.num_blocks(name),
            "hit_tokens": hits.get(name, 0),
            "hint_tokens": hints.get(name, 0),
            "groups": self._groups(arrival, name, tiers),
        }

    def _groups(self, arrival: Arrival, name: str, tiers: Tier) -> list[JsonObject]:
        """Blocks by cache group, holes or not."""
        if arrival.layout is None or not arrival.hashes:
            return []
        return [
            {
                "group": group.index,
                "kind": group.kind.value,
                "tokens_per_block": group.tokens_per_block,
                "num_blocks": arrival.num_prompt_tokens // group.tokens_per_block,
                "num_blocks_held": (
                    held := self.live.driver.index.num_held(
                        name, arrival.layout, group, arrival.hashes, tiers
                    )
                ),
                # A checkpoint stands for all tokens before it; it has no length of its own.
                "num_tokens_held": None
                if group.kind is GroupKind.LINEAR_STATE
                else held * group.tokens_per_block,
            }
            for group in arrival.layout.groups
        ]


def _foreseen(found: Routed | RefusedRequest) -> JsonObject:
    if isinstance(found, RefusedRequest):
        route: JsonObject = {"prefill": None, "source": "", "destination": ""}
    else:
        names = found.prefill, found.source, found.destination
        route = dict(zip(("prefill", "source", "destination"), names, strict=True))
    return decision_json(found.decision) | route
