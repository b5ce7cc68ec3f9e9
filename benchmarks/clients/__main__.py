"""AIPerf and GuideLLM against a gateway and two sites over the WAN lab. Needs root.

    python -m benchmarks.clients --aiperf VENV --guidellm VENV [--requests 300]

AIPerf replays Mooncake's conversations, a tenth as long and twice as fast, once as they are
and once with every fifth request cancelled; GuideLLM sends requests by a Poisson process. Prints
what they say of the time to first token beside the gateway's own metrics, errors, and what is still
held.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import shutil
import tempfile
from pathlib import Path

from benchmarks.two_sites import GATEWAY

from .site import MODEL, Lab, lab

TRACE = Path(__file__).parents[2] / "examples/sim/traces/mooncake_conversation.jsonl.gz"
RATE, RTT_MS, TIME_SCALE = 10**9, 40.0, 0.3
LENGTH_SCALE, SPEED_UP = 10, 2
BLOCK_TOKENS = 512
TOKENIZER = "prfaas/timing"
OUTPUT_MAX = 64
EMPTY_S = 20.0


def write_trace(path: Path, count: int) -> None:
    """The first requests of the trace, shorter; what they share stays shared."""
    lines = []
    with gzip.open(TRACE, "rt") as trace:
        for _, line in zip(range(count), trace, strict=False):
            row = json.loads(line)
            row["timestamp"] //= SPEED_UP
            row["input_length"] = max(1, row["input_length"] // LENGTH_SCALE)
            row["output_length"] = max(1, min(OUTPUT_MAX, row["output_length"] // LENGTH_SCALE))
            blocks = -(-row["input_length"] // (BLOCK_TOKENS // LENGTH_SCALE))
            row["hash_ids"] = row["hash_ids"][:blocks]
            lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n")


def cache_tokenizer(made: Lab) -> dict[str, str]:
    """Put the tokenizer where Hugging Face's libraries look; the environment that says so.

    AIPerf makes the prompts of a trace in processes that take a tokenizer from there alone.
    """
    repository = made.place / "hub" / f"models--{TOKENIZER.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("local")
    shutil.copytree(made.tokenizer, repository / "snapshots" / "local")
    return dict(os.environ, HF_HUB_CACHE=str(made.place / "hub"), HF_HUB_OFFLINE="1")


def aiperf(venv: Path, made: Lab, name: str, count: int, *more: str) -> list[str]:
    """Replay of the trace."""
    command = [str(venv / "bin/aiperf"), "profile", "--model", MODEL, "--url", f"http://{GATEWAY}"]
    command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", TOKENIZER]
    command += ["--input-file", str(made.place / "trace.jsonl"), "--fixed-schedule"]
    command += ["--custom-dataset-type", "mooncake_trace", "--fixed-schedule-auto-offset"]
    command += ["--isl-block-size", str(BLOCK_TOKENS // LENGTH_SCALE), "--ui", "none"]
    command += ["--request-count", str(count), "--artifact-dir", str(made.place / name)]
    return [*command, *more]


def guidellm(venv: Path, made: Lab, count: int) -> list[str]:
    """Poisson arrivals of synthetic prompts."""
    command = [str(venv / "bin/guidellm"), "run", "--disable-progress"]
    command += ["--backend", f"kind=openai_http,target=http://{GATEWAY},model={MODEL},http2=false"]
    command += ["--profile", "kind=poisson,rate=3"]
    command += ["--constraint", f"kind=max_requests,count={count}"]
    data = "kind=synthetic_text,prompt_tokens=1500,prompt_tokens_stdev=800,output_tokens=32"
    command += ["--data", f"{data},prompt_tokens_min=50,prompt_tokens_max=6000"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"]
    return [*command, "--output", f"kind=json,path={made.place}/guidellm.json"]


async def compare(made: Lab, name: str, command: list[str], env: dict[str, str]) -> None:
    """Run a client and print what it and the gateway say."""
    before = await made.metrics()
    await made.run(name, command, env)
    after = await made.metrics()

    def grown(metric: str) -> float:
        return after.get(metric, 0.0) - before.get(metric, 0.0)

    ttft = "prfaas_time_to_first_token_seconds"
    ours = 1e3 * grown(f"{ttft}_sum") / max(1.0, grown(f"{ttft}_count"))
    said, num_errors = reported(made.place, name)
    held = await made.held()
    for _ in range(int(EMPTY_S)):
        if not held:
            break
        await asyncio.sleep(1)
        held = await made.held()
    print(
        f"{name}: {grown('prfaas_requests_total'):.0f} requests, {num_errors} errors; mean TTFT "
        f"{said:.1f} ms, ours {ours:.1f} ms ({(ours / said - 1) if said else 0:+.1%}); "
        f"{grown('prfaas_kv_bytes_total') / 1e6:.1f} MB shipped; still held: {held or 'nothing'}",
        flush=True,
    )


def reported(place: Path, name: str) -> tuple[float, int]:
    """Mean TTFT in milliseconds and errors, as the client says."""
    if name == "guidellm":
        run = json.loads((place / "guidellm.json").read_text())["benchmarks"][0]
        ttft = run["metrics"]["time_to_first_token_ms"]["successful"]["mean"]
        return float(ttft), int(run["metrics"]["request_totals"]["errored"])
    report = json.loads(next((place / name).rglob("profile_export_aiperf.json")).read_text())
    errors = report.get("error_request_count") or {"avg": 0}
    return float(report["time_to_first_token"]["avg"]), int(errors["avg"])


async def clients(options: argparse.Namespace, place: Path) -> None:
    write_trace(place / "trace.jsonl", options.requests)
    async with lab(place, RATE, RTT_MS, TIME_SCALE) as made:
        env = cache_tokenizer(made)
        if options.aiperf:
            command = aiperf(options.aiperf, made, "aiperf", options.requests)
            await compare(made, "aiperf", command, env)
            cancel = ["--request-cancellation-rate", "20", "--request-cancellation-delay", "0.2"]
            cancel += ["--random-seed", "7"]  # Prompts of its own, which no cache holds.
            command = aiperf(options.aiperf, made, "aiperf-cancel", options.requests, *cancel)
            await compare(made, "aiperf-cancel", command, env)
        if options.guidellm:
            command = guidellm(options.guidellm, made, options.requests)
            await compare(made, "guidellm", command, env)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--aiperf", type=Path, metavar="VENV", help="with aiperf==0.13.0")
    parser.add_argument("--guidellm", type=Path, metavar="VENV", help="with guidellm==0.8.1")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--keep", type=Path, help="folder for logs and reports, kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        asyncio.run(clients(options, options.keep or Path(place)))


if __name__ == "__main__":
    main()
