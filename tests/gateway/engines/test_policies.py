"""The policies over HTTP: selected in the deployment file, predicted from a plan."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from prfaas.cli.operate.ctl_views import status_lines
from prfaas.cli.parts.gateway_plan import load_profiles
from prfaas.config.engines import cores
from prfaas.config.load import load_deployment
from prfaas.core.kv.prefix_index import SourceState
from prfaas.errors import ConfigError
from prfaas.gateway.engines.engine import EngineLoad, load_in
from tests.gateway.conftest import LAYOUT, World, deployment_for, running, until
from tests.gateway.plan_tables import routing
from tests.gateway.prompts import LONG, SHORT
from tests.gateway.scripted_engine import drop, hang
from tests.plans import plan_file


async def routed(world: World, prompt: str) -> dict[str, Any]:
    status, _ = await world.post({"prompt": prompt, "max_tokens": 2})
    assert status == 200
    return await world.record()


@pytest.mark.parametrize(
    ("policy", "paths", "reasons"),
    [
        ("local", ("local", "local"), ("always_local", "always_local")),
        ("remote", ("remote", "remote"), ("always_remote", "always_remote")),
        ("paper", ("local", "remote"), ("below_threshold", "above_threshold")),
    ],
)
async def test_each_policy_can_be_selected(
    checkpoint: Path,
    identities: Path,
    tmp_path: Path,
    policy: str,
    paths: tuple[str, str],
    reasons: tuple[str, str],
) -> None:
    async with routing(checkpoint, identities, tmp_path, policy=policy) as world:
        records = [await routed(world, prompt) for prompt in ("x" * 80, LONG)]
    assert tuple(record["path"] for record in records) == paths
    assert tuple(record["reason"] for record in records) == reasons
    assert [record["predicted_local_ms"] for record in records] == [None, None]


async def test_adaptive_predicts_both_paths_from_the_plan(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    plan = str(plan_file(tmp_path))
    async with routing(checkpoint, identities, tmp_path, plan=plan) as world:
        record = await routed(world, LONG)
        assert (record["path"], record["reason"]) == ("remote", "above_threshold")
        assert record["offload_threshold"] == 100
        assert record["prefill_cluster"] == "prfaas"
        # 360 tokens lie between the knots at 100 and 4,000.
        assert 3000 < record["predicted_local_ms"] < 30_000
        assert 1000 < record["predicted_remote_ms"] < 10_000


async def test_a_path_that_is_predicted_to_be_slower_is_not_taken(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    plan = str(plan_file(tmp_path, remote_s=30))
    async with routing(checkpoint, identities, tmp_path, plan=plan) as world:
        record = await routed(world, LONG)
        assert (record["path"], record["reason"]) == ("local", "faster_local")
        assert "predicted faster locally" in record["explanation"]


async def test_the_queue_of_an_engine_counts(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    """Requests of others are in the metrics of the prefill engine."""
    plan = str(plan_file(tmp_path))
    async with routing(checkpoint, identities, tmp_path, plan=plan) as world:
        assert (await routed(world, LONG))["path"] == "remote"
        first = (await world.record())["predicted_remote_ms"]
        world.prefill.num_waiting = 50
        book = world.gateway.driver.dispatcher.load("prefill")
        await until(lambda: (book.wait_ns("prefill", time.monotonic_ns()) or 0) > 10**10)
        record = await routed(world, LONG + "and more")
        assert record["predicted_remote_ms"] > 10 * first
        assert (record["path"], record["reason"]) == ("local", "faster_local")


async def test_an_engine_that_tells_no_queue_leaves_the_threshold_to_decide(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    plan = str(plan_file(tmp_path, remote_s=30))
    async with routing(checkpoint, identities, tmp_path, plan=plan) as world:
        driver = world.gateway.driver
        late = time.monotonic_ns() + 60 * 10**9
        book = driver.dispatcher.load("prefill")
        assert book.wait_ns("prefill", time.monotonic_ns()) is not None
        assert book.wait_ns("prefill", late) is None


def test_the_load_of_an_engine_is_read_from_its_metrics() -> None:
    assert load_in(b"") == EngineLoad()
    assert load_in(b"vllm:num_requests_waiting 1e999\n") == EngineLoad()
    assert load_in(b"vllm:num_requests_waiting 1e\n") == EngineLoad()
    two = b"".join(
        b'vllm:num_requests_waiting{engine="%d"} %d.0\n' % (number, number + 2)
        + b'vllm:num_requests_running{engine="%d"} 1.0\n' % number
        + b'vllm:kv_cache_usage_perc{engine="%d"} 0.%d\n' % (number, number + 2)
        for number in range(2)
    )
    assert load_in(b"# HELP vllm:num_requests_waiting Number\n" + two) == EngineLoad(5, 2, 0.3)
    # Of a data-parallel rank alone, and of one that it does not have.
    assert [load_in(two, rank) for rank in range(3)] == [
        EngineLoad(2, 1, 0.2),
        EngineLoad(3, 1, 0.3),
        EngineLoad(),
    ]


def prove(world: World) -> None:
    """Have first tokens come when they were predicted, on both paths."""
    now_ns = time.monotonic_ns()
    for calibration in world.gateway.driver.dispatcher.calibrations.values():
        for _ in range(10):
            calibration.observe(calibration.expect(10**9, now_ns), now_ns + 10**9)


async def test_nobody_is_refused_before_predictions_are_proven(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    table = {"plan": str(plan_file(tmp_path)), "ttft_max": "5s"}
    async with routing(checkpoint, identities, tmp_path, **table) as world:
        assert (await routed(world, "x" * 3000))["predicted_remote_ms"] > 5000


async def test_what_would_come_too_late_is_refused_with_a_time_to_come_back(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    table = {"plan": str(plan_file(tmp_path)), "ttft_max": "5s"}
    async with routing(checkpoint, identities, tmp_path, **table) as world:
        assert (await routed(world, SHORT))["outcome"] == "finished"
        prove(world)
        body = {"prompt": "x" * 3000, "max_tokens": 2}
        async with world.http.post(f"{world.url}/v1/completions", json=body) as response:
            answer = await response.json()
        assert response.status == 429
        # 7.7 s are predicted for 3,000 tokens in the PrfaaS cluster.
        assert response.headers["Retry-After"] == "3"
        assert response.headers["X-Prfaas-Reason"] == "predicted_late"
        assert answer["error"]["type"] == "TooManyRequestsError"
        record = await world.record()
        assert (record["outcome"], record["refusal"]) == ("rejected", "predicted_late")
        assert record["path"] == "none"  # it was sent nowhere
        assert record["predicted_remote_ms"] > 5000
        assert await world.metric('prfaas_requests_refused_total{reason="predicted_late"}') == 1
        assert len(world.gateway.driver.dispatcher.requests) == 0


async def test_the_first_token_is_compared_with_its_prediction(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    plan = str(plan_file(tmp_path))
    async with routing(checkpoint, identities, tmp_path, plan=plan) as world:
        world.decode.cached_tokens = 10_000
        for stream in (True, False):
            body = {"prompt": LONG, "max_tokens": 2, "stream": stream}
            async with world.http.post(f"{world.url}/v1/completions", json=body) as response:
                await response.read()
        name = "prfaas_ttft_over_predicted_ratio"
        assert await world.metric(f'{name}_count{{path="remote"}}') == 1
        assert await world.metric(f'{name}_bucket{{le="0.25",path="remote"}}') == 1


async def test_predictions_of_a_plan_that_is_far_off_are_corrected_and_shown(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    """The scripted engine takes milliseconds, the plan says seconds for prompts at home."""
    table = {"plan": str(plan_file(tmp_path)), "ttft_max": "1s", "policy": "local"}
    async with routing(checkpoint, identities, tmp_path, **table) as world:
        body = {"prompt": SHORT, "max_tokens": 2, "stream": True}
        for _ in range(30):
            async with world.http.post(f"{world.url}/v1/completions", json=body) as response:
                assert response.status == 200
                await response.read()
        name = 'prfaas_prediction_%s{cluster="pd",path="local"}'
        assert await world.metric(name % "correction_ratio") == pytest.approx(0.1)
        record = await world.record()
        assert record["predicted_local_ms"] < 400
        async with world.http.get(f"{world.url}/control/status") as response:
            local, remote = (await response.json())["predictions"]
        assert (local["path"], local["correction"], local["num_samples"]) == ("local", 0.1, 30)
        assert (remote["path"], remote["cluster"], remote["num_samples"]) == ("remote", "prfaas", 0)
        async with world.http.get(f"{world.url}/console/api/state") as response:
            alarms = {alarm["name"] for alarm in (await response.json())["alarms"]}
        assert alarms & {"plan_does_not_fit", "predictions_off"}


async def test_the_bytes_of_blocks_correct_those_of_a_plan_and_are_shown(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    """A plan of another model, before the first transfer."""
    plan = plan_file(tmp_path)
    plan.write_text(plan.read_text().replace("1kB", "1MB"))
    async with routing(checkpoint, identities, tmp_path, plan=str(plan)) as world:
        factor = await world.metric("prfaas_plan_bytes_correction_ratio")
        assert factor < 0.1
        async with world.http.get(f"{world.url}/control/status") as response:
            status = await response.json()
        assert status["plan_bytes"] == {"correction": pytest.approx(factor), "num_transfers": 0}
        assert any(
            line.startswith("plan       bytes corrected by") for line in status_lines(status)
        )
        async with world.http.get(f"{world.url}/console/api/state") as response:
            alarms = {alarm["name"] for alarm in (await response.json())["alarms"]}
        assert "plan_bytes_off" in alarms


async def test_nothing_is_held_once_all_requests_have_ended(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    """Finished, refused by an engine, given up by the client, fallen back."""
    plan = str(plan_file(tmp_path))
    async with routing(checkpoint, identities, tmp_path, plan=plan) as world:
        dispatcher = world.gateway.driver.dispatcher
        await routed(world, LONG)
        world.prefill.script = hang
        with pytest.raises(TimeoutError):
            await world.http.post(
                f"{world.url}/v1/completions", json={"prompt": LONG + "1"}, timeout=_timeout(0.2)
            )
        await until(lambda: not len(dispatcher.requests))
        world.prefill.script = drop
        assert (await routed(world, LONG + "2"))["fallback"]["stage"] == "prefill"
        assert (len(dispatcher.requests), dispatcher.promised_bytes) == (0, 0)


async def test_a_pool_that_is_not_heard_draws_requests_and_counts_as_no_hit(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with routing(checkpoint, identities, tmp_path) as world:
        ids = list(range(128))
        world.pd_pool.store(LAYOUT, world.keys(ids, 64))
        index = world.gateway.index
        await until(lambda: index.num_blocks("pd-pool") > 0)
        await world.pd_pool.stop()
        await until(lambda: index.state("pd-pool") is SourceState.DEGRADED)
        hashes = world.hashes(ids)
        assert index.usable_hit("pd-pool", LAYOUT, hashes, 128) == 0
        assert index.hint("pd-pool", LAYOUT, hashes, 128) == 64
        sample = 'prfaas_index_state{pool="pd-pool",state="degraded"}'
        assert await world.metric(sample) == 1
        status, _ = await world.post({"prompt": ids, "max_tokens": 2})
        assert status == 200
        assert (await world.record())["pd_hit_tokens"] == 0


def test_a_plan_that_does_not_fit_is_one_clear_error(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    path = plan_file(tmp_path)
    text = path.read_text()
    second = text[text.index("[[prfaas]]") : text.index("[pd]")].replace('"remote"', '"other"')
    path.write_text(text.replace("[pd]", second + "[pd]"))
    deployment = deployment_for(checkpoint, identities, tmp_path, routing={"plan": str(path)})
    with pytest.raises(ConfigError, match="called 'prfaas' as in the deployment file; there are"):
        load_profiles(deployment)
    missing = deployment_for(checkpoint, identities, tmp_path, routing={"plan": "nowhere.toml"})
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read"):
        load_profiles(missing)


def test_a_target_without_a_plan_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "deployment.toml"
    file.write_text('[routing]\noffload_threshold = 1\nttft_max = "1s"\n')
    with pytest.raises(ConfigError, match="ttft_max needs a plan"):
        load_deployment(file)


def _timeout(seconds: float) -> Any:
    import aiohttp

    return aiohttp.ClientTimeout(total=seconds)


@pytest.mark.parametrize(
    ("cpus", "reason"), [("1", "shared_cores"), ("0-1", "above_threshold")], ids=["same", "more"]
)
async def test_cores_of_the_deployment_file_decide_without_a_plan(
    checkpoint: Path,
    identities: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cpus: str,
    reason: str,
) -> None:
    """The PD engines have core 1."""
    monkeypatch.setattr(cores, "runs_on_cpu", lambda: True)
    async with running(checkpoint, identities, tmp_path / "state", remote={"cpus": cpus}) as world:
        record = await routed(world, LONG)
        assert record["reason"] == reason
