"""(d) TTFT of the local and the remote path over an emulated link, beside the gateway's prediction.

The prediction is that of `core/routing/predictions.py`, with the prefill time measured here. The
link is a relay in this process: near 10 Gbit/s its own rate may be the limit, and `link_bytes` over
the time shows it.
"""

from __future__ import annotations

import json
import random
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from prfaas.core.routing.decision import RoutingFacts
from prfaas.core.routing.predictions import CostModel, LinkState, PathSignals, predict
from prfaas.planner.model.hf_config import geometry_from_config
from prfaas.planner.model.kv_geometry import shipped_kv_bytes
from tests.gpu.kit import models
from tests.gpu.kit.deployment import running, settings
from tests.gpu.kit.results import Results
from tests.gpu.suite import TOKEN_ID_MAX, first_token_s
from tests.lab.faults import Fault
from tests.live.conftest import Live
from tests.live.identity_by_kind import announced

LINKS = (10**9, 10**10)
"""Bits per second."""
ONE_WAY_S = 0.005
LENGTHS, LENGTHS_CPU = (8_192, 32_768), (2_048,)
LARGE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 4,
    "max_position_embeddings": 65_536,
}
"""Four layers of Llama 3 8B: 16 KiB of KV cache a token."""


class Costs(CostModel):
    """Costs from what was measured: one prefill time, and the bytes of the layout."""

    def __init__(self, prefill_s: float, num_bytes: int, tail_bytes: int) -> None:
        self.prefill_ns, self.num_bytes, self.tail = round(prefill_s * 1e9), num_bytes, tail_bytes

    def local_prefill_ns(self, *_: Any) -> int:
        return self.prefill_ns

    def remote_prefill_ns(self, *_: Any) -> int:
        return self.prefill_ns

    def shipped_bytes(self, *_: Any) -> int:
        return self.num_bytes

    def tail_bytes(self, *_: Any) -> int:
        return self.tail


async def run(results: Results) -> None:
    """Measure each length alone, then remotely over each link."""
    is_gpu = results.device == "cuda"
    lengths = LENGTHS if is_gpu else LENGTHS_CPU
    make = partial(models.make, models.DENSE, fields=LARGE, device=results.device)
    make = make if is_gpu else partial(models.make, models.DENSE)
    overlay = settings(
        results.device, models.DENSE, max(lengths) + 256, "8GiB" if is_gpu else "256MiB"
    )
    draws = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="kit-") as local:
        async with running(Path(local), overlay, make) as (live, link):
            layout = await announced(live.topology)
            config = json.loads((Path(local) / "model" / "config.json").read_text())
            geometry = geometry_from_config(config, state_dtype="float32")
            engine = live.topology.engines["pd-engine"]
            for length in (min(lengths), *lengths):  # The first is a warm-up.
                alone_s = await first_token_s(live.http, engine, _body(live, length, draws))
                if length == lengths[0]:
                    await first_token_s(live.http, live.url, _body(live, length, draws))
            for length in lengths:
                alone_s = await first_token_s(live.http, engine, _body(live, length, draws))
                planned = shipped_kv_bytes(geometry, length, layout.boundary_tokens)
                for bits_per_s in LINKS:
                    link.link_bits_per_s, link.delay_s = bits_per_s, ONE_WAY_S
                    # The delay is that of new connections.
                    link.strike(Fault.CUT)
                    await live.remote_again(f"{length} {bits_per_s}")
                    if results.damage == "skipped copy":
                        link.strike(Fault.HALF_OPEN)
                    body, seen = _body(live, length, draws), link.num_bytes
                    remote_s = await first_token_s(live.http, live.url, body)
                    record = await _last(live)
                    expected_s = predicted_s(alone_s, planned, bits_per_s)
                    results.add(
                        "ttft",
                        tokens=length,
                        link_bits_per_s=bits_per_s,
                        rtt_s=2 * ONE_WAY_S,
                        alone_s=alone_s,
                        remote_s=remote_s,
                        predicted_s=expected_s,
                        ratio=remote_s / expected_s,
                        kv_bytes=record["kv_bytes"],
                        planned_bytes=planned,
                        link_bytes=link.num_bytes - seen,
                        path=record["path"],
                        fallback=record["fallback"],
                    )
                    where = f"{length} tokens at {bits_per_s / 1e9:g} Gbit/s"
                    is_remote = record["path"] == "remote" and record["fallback"] is None
                    results.check(is_remote, f"{where}: {record['path']}, {record['fallback']}")
                    results.check(
                        not is_remote or record["kv_bytes"] == planned,
                        f"{where}: {record['kv_bytes']} bytes were shipped, not {planned}",
                    )


def predicted_s(prefill_s: float, num_bytes: int, bits_per_s: float, chunk: float = 0.0) -> float:
    """Return the prediction of the remote path, seconds.

    Args:
        prefill_s: Prefill alone.
        num_bytes: Shipped.
        bits_per_s: Of the link.
        chunk: Share of the bytes that leave once prefill has ended; 0 lets all overlap.
    """
    link = LinkState(bits_per_s=bits_per_s, rtt_ns=round(2e9 * ONE_WAY_S))
    signals = PathSignals(local_wait_ns=0, remote_wait_ns=0, link=link)
    costs = Costs(prefill_s, num_bytes, round(num_bytes * chunk))
    found = predict(RoutingFacts(num_prompt_tokens=1), signals, costs)
    if found.remote_ns is None:
        raise ValueError("the remote path has no prediction")
    return found.remote_ns / 1e9


def _body(live: Live, length: int, draws: random.Random) -> dict[str, object]:
    prompt = [draws.randrange(10, TOKEN_ID_MAX) for _ in range(length)]
    return {"model": live.model, "prompt": prompt, "temperature": 0}


async def _last(live: Live) -> dict[str, Any]:
    """The record of the last request."""
    async with live.http.get(f"{live.url}/control/requests") as reply:
        [last, *_] = (await reply.json())["requests"]
    return await live.record(last["request_id"])
