"""`/tokenize` and `/detokenize`: token ids as the engines compute them, in vLLM's form."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from prfaas.config.clusters import ClusterRole
from prfaas.gateway.api.auth import TENANT
from prfaas.gateway.api.entrance import RequestAdmission
from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.http.request_body import read
from prfaas.gateway.http.responses import json_response
from prfaas.gateway.openai.fields import bad, shown
from prfaas.gateway.openai.requests import Api, check_model, parse_object, parse_request, token_ids
from prfaas.gateway.telemetry.live_parts import LiveParts
from prfaas.gateway.tenancy.tenants import Tenant
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
