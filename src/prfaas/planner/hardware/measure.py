"""Measurements of a running engine over HTTP: prefill times by length and by cached prefix, decode
step times by batch and context.

Every prompt is drawn at random, so no prefix cache serves it, but for the prefix that a resumed
prefill is to have; the engine's own count of cached tokens is checked where it reports one. Each
figure is a median over repeats after one discarded warm-up. The time of a prefill includes the
request's way to the engine and back.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import aiohttp
import msgspec

from prfaas.errors import EngineError

_CACHED_MIN = 0.9  # of a prefix: an engine keeps whole blocks
_MANY = 10  # samples from which single outliers do not count as spread

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer of an engine."""

    prompt_tokens: int
    """Prompt tokens as the engine counted them."""
    cached_tokens: int | None
    """Prompt tokens served by its prefix cache; None if not reported."""
    token_times_s: tuple[float, ...]
    """Time when each output token arrived, counted from sending the request, s."""


class NoPrefixCacheError(EngineError):
    """An engine computed a prefix that it had computed before."""


class MeasuredEngine(Protocol):
    """An engine that completes prompts given as token ids.

    A call does not change anything that later calls see, except the engine's prefix cache.
    """

    async def complete(self, prompt: Sequence[int], num_tokens: int) -> Completion:
        """Generate exactly `num_tokens`; costs one prefill and as many decode steps; EngineError if
        the engine cannot be reached or answers with an error."""

    async def complete_all(
        self, prompts: Sequence[Sequence[int]], num_tokens: int
    ) -> list[Completion]:
        """Generate for all prompts concurrently; times count from one common start."""


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """Repeated measurements of one point."""

    x: float
    """Length in tokens, or batch."""
    seconds: tuple[float, ...]
    """One time for each repeat, s."""

    @property
    def median(self) -> float:
        """Median, s."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Slowest less fastest, or 90th less 10th percentile of many, relative to the median."""
        if len(self.seconds) < _MANY:
            return (max(self.seconds) - min(self.seconds)) / self.median
        deciles = statistics.quantiles(self.seconds, n=10)
        return (deciles[-1] - deciles[0]) / self.median


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts that no cache has seen."""

    rng: random.Random
    token_id_max: int
    """Highest token id used; ids below 3 are left to special tokens."""

    def draw(self, num_tokens: int) -> list[int]:
        """Token ids of a new prompt."""
        return [self.rng.randint(3, self.token_id_max) for _ in range(num_tokens)]


async def measure_prefill(
    engine: MeasuredEngine, prompts: Prompts, lengths: Sequence[int], repeats: int, report: Report
) -> list[MeasuredPoint]:
    """Prefill times at each length; EngineError if the engine fails, miscounts the prompt, or
    served it from its cache.

    Args:
        engine: Engine to measure; should have no other load.
        repeats: Measurements of each length, at least 1.
        report: Called with a line for each length.
    """
    samples = []
    for length in lengths:
        times = []
        for attempt in range(repeats + 1):
            answer = await engine.complete(prompts.draw(length), 1)
            _check(answer, length)
            if attempt:
                times.append(answer.token_times_s[0])
        sample = MeasuredPoint(length, tuple(times))
        report(f"prefill {length:>8,} tokens  {_shown(sample)}")
        samples.append(sample)
    return samples


async def measure_resumed(
    engine: MeasuredEngine,
    prompts: Prompts,
    *,
    prefixes: Sequence[int],
    new_tokens: Sequence[int],
    repeats: int,
    report: Report,
) -> list[list[MeasuredPoint]]:
    """Prefill times after a cached prefix: a row for each prefix, a sample for each new length.

    The `x` of a sample is the prefix that the engine had cached: as it reports, else as it was sent
    before.

    Args:
        engine: Engine to measure, with a prefix cache; should have no other load.
        prefixes: Tokens that the engine has computed before.
        new_tokens: Tokens after them, which it computes.
        repeats: Measurements of each point, at least 1.
        report: Called with a line for each point.

    Raises:
        NoPrefixCacheError: The engine reports that it had not cached a prefix.
        EngineError: The engine fails.
    """
    table = []
    for prefix in prefixes:
        base, row = prompts.draw(prefix), []
        await engine.complete(base, 1)
        for length in new_tokens:
            times, cached = [], prefix
            for attempt in range(repeats + 1):
                answer = await engine.complete([*base, *prompts.draw(length)], 1)
                cached = _cached(answer, prefix)
                if attempt:
                    times.append(answer.token_times_s[0])
            sample = MeasuredPoint(cached, tuple(times))
            report(f"prefill {length:>8,} tokens after {prefix:,} cached  {_shown(sample)}")
            row.append(sample)
        table.append(row)
    return table


async def measure_decode(
    engine: MeasuredEngine,
    prompts: Prompts,
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    num_tokens: int,
    report: Report,
) -> list[list[MeasuredPoint]]:
    """Decode step times: one row for each batch, one sample for each context; EngineError if the
    engine fails, or the requests were never all concurrent.

    Args:
        engine: Engine to measure; should have no other load.
        batches: Numbers of concurrent requests.
        num_tokens: Output tokens of each request; more make the overlap longer.
        report: Called with a line for each point.
    """
    table = []
    for batch in batches:
        row = []
        for context in contexts:
            drawn = [prompts.draw(context) for _ in range(batch)]
            answers = await engine.complete_all(drawn, num_tokens)
            sample = MeasuredPoint(batch, step_times([a.token_times_s for a in answers]))
            report(f"decode batch {batch:>4}, {context:>8,} tokens  {_shown(sample)}")
            row.append(sample)
        table.append(row)
    return table


def step_times(streams: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Gaps between tokens while all streams were running, s; EngineError if the last stream started
    after the first had ended.

    Args:
        streams: Arrival times of the tokens of each stream, s.
    """
    start = max(times[0] for times in streams)
    end = min(times[-1] for times in streams)
    gaps = [
        later - earlier
        for times in streams
        for earlier, later in pairwise(times)
        if earlier >= start and later <= end
    ]
    if not gaps:
        raise EngineError(
            f"{len(streams)} requests were never concurrent: the last began at {start:.2f} s, the "
            f"first ended at {end:.2f} s; ask for more output tokens or a smaller batch"
        )
    return tuple(gaps)


def _cached(answer: Completion, prefix: int) -> int:
    if answer.cached_tokens is None:
        return prefix
    if answer.cached_tokens < _CACHED_MIN * prefix:
        raise NoPrefixCacheError(
            f"{answer.cached_tokens} of {prefix} tokens that were sent before came from the "
            "engine's cache; enable its prefix cache, make it larger, or give --prefixes none"
        )
    return answer.cached_tokens


def _check(answer: Completion, length: int) -> None:
    if answer.cached_tokens:
        raise EngineError(
            f"{answer.cached_tokens} of {length} random prompt tokens came from the engine's "
            "cache; raise --max-token-id, so that prompts do not repeat"
        )
    if answer.prompt_tokens != length:
        raise EngineError(
            f"the engine counted {answer.prompt_tokens} prompt tokens, {length} were sent; it "
            "does not accept token ids unchanged"
        )


def _shown(sample: MeasuredPoint) -> str:
    return f"{sample.median * 1e3:10.1f} ms  spread {sample.spread:5.1%}"


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
        """Generate exactly `num_tokens` tokens; EngineError if the engine cannot be reached or
        answers with an error."""
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
