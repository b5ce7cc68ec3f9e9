"""The OpenAI completions API as the port that `measure` needs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import aiohttp
import msgspec

from prfaas.errors import EngineError
from prfaas.planner.hardware.measure import Completion

_TIMEOUT_S = 600.0
_LINE_BYTES_MAX = 2**20


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: _Error | None = None


class HttpEngine:
    """An OpenAI-compatible engine.

    Args:
        session: HTTP client; its owner closes it.
        url: Base URL, such as "http://localhost:8000".
        model: Name of the served model.
        api_key: Bearer token, or None.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, api_key: str | None = None
    ) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._model = model
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def complete(self, prompt: Sequence[int], num_tokens: int) -> Completion:
        """Generate exactly `num_tokens` tokens.

        Raises:
            EngineError: The engine cannot be reached or answers with an error.
        """
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "min_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            return await self._stream(body)
        except aiohttp.ClientError as error:
            raise EngineError(f"engine {self._url}: {error}") from error
        except TimeoutError as error:
            raise EngineError(f"engine {self._url}: no answer in {_TIMEOUT_S:.0f} s") from error
        except msgspec.DecodeError as error:
            raise EngineError(f"engine {self._url} sent no valid JSON: {error}") from error

    async def complete_all(
        self, prompts: Sequence[Sequence[int]], num_tokens: int
    ) -> list[Completion]:
        """Send all prompts concurrently."""
        return await asyncio.gather(*(self.complete(p, num_tokens) for p in prompts))

    async def version(self) -> str:
        """Return the version that the engine reports, or "unknown version"."""
        try:
            async with self._session.get(f"{self._url}/version") as answer:
                if answer.status == 200:
                    return str((await answer.json()).get("version", "unknown version"))
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return "unknown version"
        return "unknown version"

    async def _stream(self, body: dict[str, object]) -> Completion:
        start = time.perf_counter()
        times: list[float] = []
        usage = _Usage()
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with self._session.post(
            f"{self._url}/v1/completions",
            json=body,
            headers=self._headers,
            timeout=timeout,
            read_bufsize=_LINE_BYTES_MAX,
        ) as answer:
            if answer.status != 200:
                text = (await answer.text())[:300]
                raise EngineError(
                    f"engine {self._url} answered {answer.status}: {text}{_advice(text)}"
                )
            async for event in _events(answer):
                if event.error is not None:
                    raise EngineError(f"engine {self._url}: {event.error.message[:300]}")
                if event.choices:
                    times.append(time.perf_counter() - start)
                usage = event.usage or usage
        if not times:
            raise EngineError(f"engine {self._url} sent no token")
        details = usage.prompt_tokens_details
        return Completion(
            usage.prompt_tokens, details.cached_tokens if details else None, tuple(times)
        )


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[_Event]:
    async for raw in answer.content:
        line = raw.strip()
        if line.startswith(b"data:") and not line.endswith(b"[DONE]"):
            yield msgspec.json.decode(line[5:], type=_Event)


def _advice(text: str) -> str:
    """Return advice on an engine's refusal, or an empty text."""
    if "out of vocabulary" in text:
        return "; give --max-token-id, a number below the size of the model's vocabulary"
    return ""
