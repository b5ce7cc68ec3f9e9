"""`prfaas profile` against engines that answer by formula, and over real sockets."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from click.testing import CliRunner

from prfaas.cli.plan.plan_command import profile
from prfaas.errors import EngineError
from prfaas.planner.answer.plan_file import ProfileFile
from prfaas.planner.answer.plan_loader import prefill_from
from prfaas.planner.hardware.fit import ResumedFit, fit_prefill, profile_toml
from prfaas.planner.hardware.measure import (
    Completion,
    HttpEngine,
    MeasuredPoint,
    Prompts,
    measure_decode,
    measure_prefill,
    step_times,
)
from prfaas.toml_tables import read_toml, validated

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FormulaEngine:
    """Prefill takes 0.1 s + 0.2 ms a token, a decode step 10 ms + 1 ms a request."""

    def __init__(self, cached_tokens: int | None = 0) -> None:
        self.seen: list[tuple[int, ...]] = []
        self.cached_tokens = cached_tokens

    async def complete(self, prompt: Sequence[int], num_tokens: int) -> Completion:
        return (await self.complete_all([prompt], num_tokens))[0]

    async def complete_all(
        self, prompts: Sequence[Sequence[int]], num_tokens: int
    ) -> list[Completion]:
        self.seen += [tuple(p) for p in prompts]
        step = 0.01 + 0.001 * len(prompts)
        answers = []
        for i, prompt in enumerate(prompts):
            first = 0.1 + 2e-4 * len(prompt) + i * step
            times = tuple(first + k * step for k in range(num_tokens))
            answers.append(Completion(len(prompt), self.cached_tokens, times))
        return answers


def prompts() -> Prompts:
    return Prompts(random.Random(1), 500)


async def test_a_profile_of_a_known_engine_is_its_formula(tmp_path: Path) -> None:
    engine = FormulaEngine()
    lines: list[str] = []
    samples = await measure_prefill(engine, prompts(), [512, 1024, 4096, 8192], 3, lines.append)
    decode = await measure_decode(
        engine, prompts(), batches=[1, 8], contexts=[512], num_tokens=16, report=lines.append
    )
    fit = fit_prefill(samples)
    path = tmp_path / "profile.toml"
    path.write_text(profile_toml("a test", samples, fit, ResumedFit(), decode, [512]))
    file = validated(ProfileFile, read_toml(path), path)
    assert file.prefill is not None
    assert file.decode is not None
    profile = prefill_from(file.prefill, "test")
    assert profile.seconds_at(2048) == pytest.approx(0.1 + 2e-4 * 2048, rel=0.02)
    assert fit.r_squared == pytest.approx(1)
    assert fit.coefficients == pytest.approx((0.1, 2e-4, 0), abs=1e-6)
    assert file.decode.step == [[pytest.approx(0.011)], [pytest.approx(0.018)]]
    assert len(lines) == 6


async def test_prompts_never_repeat() -> None:
    engine = FormulaEngine()
    await measure_prefill(engine, prompts(), [64, 128], 3, lambda _: None)
    assert len({p[:16] for p in engine.seen}) == len(engine.seen) == 8


async def test_a_cache_hit_is_an_error() -> None:
    with pytest.raises(EngineError, match="32 of 64 random prompt tokens came from"):
        await measure_prefill(FormulaEngine(32), prompts(), [64], 1, lambda _: None)


def test_falling_medians_are_raised_and_said() -> None:
    samples = [MeasuredPoint(x, (y,)) for x, y in ((1, 1.0), (2, 0.9), (3, 2.0))]
    fit = fit_prefill(samples)
    assert fit.seconds == (1.0, 1.0, 2.0)
    assert "1 falling medians raised" in fit.words()


def test_steps_count_only_while_all_streams_run() -> None:
    early, late = [0.0, 1.0, 2.0, 3.0, 4.0], [2.0, 2.5, 3.0, 3.5, 9.0]
    assert step_times([early, late]) == (1.0, 1.0, 0.5, 0.5, 0.5)
    with pytest.raises(EngineError, match="were never concurrent"):
        step_times([[0.0, 1.0], [2.0, 3.0]])


@asynccontextmanager
async def _server(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


async def _answer(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    response = web.StreamResponse()
    await response.prepare(request)
    usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": {"cached_tokens": 0}}
    events = [{"choices": [{"text": "x"}]} for _ in range(body["max_tokens"])]
    for event in [*events, {"choices": [], "usage": usage}]:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


async def test_streams_of_an_openai_server_are_timed() -> None:
    async with _server(_answer) as url, aiohttp.ClientSession() as session:
        engine = HttpEngine(session, url, "m")
        answers = await engine.complete_all([[5, 6, 7], [8, 9]], 4)
        assert [a.prompt_tokens for a in answers] == [3, 2]
        assert all(len(a.token_times_s) == 4 for a in answers)
        assert all(list(a.token_times_s) == sorted(a.token_times_s) for a in answers)
        assert await engine.version() == "unknown version"


async def _refuse(_request: web.Request) -> web.Response:
    return web.Response(status=404, text="no such model")


async def test_an_error_of_the_engine_is_passed_on() -> None:
    async with _server(_refuse) as url, aiohttp.ClientSession() as session:
        with pytest.raises(EngineError, match="answered 404: no such model"):
            await HttpEngine(session, url, "m").complete([5], 1)


async def _refuse_late(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b'data: {"error": {"message": "Token id 499 is out of vocabulary"}}\n\n')
    return response


async def test_an_error_inside_the_stream_is_passed_on() -> None:
    async with _server(_refuse_late) as url, aiohttp.ClientSession() as session:
        with pytest.raises(EngineError, match="Token id 499 is out of vocabulary"):
            await HttpEngine(session, url, "m").complete([499], 1)


async def test_an_absent_engine_is_an_error() -> None:
    async with _server(_refuse) as url:
        gone = url
    async with aiohttp.ClientSession() as session:
        with pytest.raises(EngineError, match="engine http"):
            await HttpEngine(session, gone, "m").complete([5], 1)


async def test_the_command_writes_a_profile_that_a_plan_can_use(tmp_path: Path) -> None:
    out = tmp_path / "profile.toml"
    async with _server(_answer) as url:
        arguments = ["--model", "m", "--hardware", "a test", "--out", str(out)]
        arguments += ["--lengths", "16,64,256,1024", "--batches", "1", "--contexts", "16"]
        result = await asyncio.to_thread(CliRunner().invoke, profile, [url, *arguments])
    assert result.exit_code == 0, result.output
    assert "R^2" in result.output
    file = validated(ProfileFile, read_toml(out), out)
    assert file.prefill is not None
    assert file.prefill.lengths == [16, 64, 256, 1024]
    assert "m on a test" in file.prefill.source
    assert file.decode is not None
    assert file.decode.batches == [1]


@pytest.mark.parametrize(
    ("option", "message"),
    [("--lengths=5", "at least 2"), ("--lengths=9,3", "rise"), ("--lengths=a", "list of integers")],
)
def test_lengths_have_to_make_a_curve(tmp_path: Path, option: str, message: str) -> None:
    arguments = ["http://127.0.0.1:9", "--model", "m", "--hardware", "x", option]
    result = CliRunner().invoke(profile, [*arguments, "--out", str(tmp_path / "p.toml")])
    assert message in f"{result.output} {result.exception}"
