"""Differences of KV blocks that honest kernels compute, against the limits of verification.

    python -m tests.poison.kernels --transfers 20000 --seconds 900
    python -m tests.poison.kernels --model demo --pair native --transfers 100

A transfer is a prompt of 48 to 192 tokens in blocks of 16. The source computes it in bfloat16 by
oneDNN, in batches of 1 to 16 prompts; the destination computes it alone or in other batches, with
other kernels:

    float32   the same weights, products and sums in float32, rounded when the block is stored
    native    bfloat16 by ATen's own kernels
    eager     bfloat16, attention as products of matrices in place of the fused kernel

Weights are random, which is the hard case for a mixture of experts: its router is undecided. Each
block is compared by the code of the pool node. Exits with 1 after a false alarm.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from prfaas.core.kv.blocks import Plane
from prfaas.core.kv.difference import differences
from prfaas.core.kv.difference_limits import LIMITS, is_altered
from prfaas.engines.checkpoint import make_checkpoint

BLOCK_TOKENS = 16
BATCHES = (1, 2, 4, 8, 16)
VOCABULARY = 256
PAIRS = ("float32", "native", "eager")
MODELS = ("dense", "experts", "demo")
Planes = list[tuple[str, bytes]]
"""Dtype and bytes of each plane of a block."""


def built(name: str) -> Any:
    """Return a model with random weights, in bfloat16."""
    torch.manual_seed(1)
    if name == "demo":
        with tempfile.TemporaryDirectory() as folder:
            make_checkpoint(Path(folder))
            return _loaded(folder)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if name == "dense":
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    else:
        experts = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
        config = transformers.Qwen3MoeConfig(**shape, **experts, head_dim=32)
        model = transformers.Qwen3MoeForCausalLM(config)
    return model.to(torch.bfloat16).eval()


def _loaded(folder: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


class Kernels:
    """One way to compute a model.

    Args:
        model: In bfloat16.
        kind: A name of PAIRS; "" is bfloat16 by oneDNN.
    """

    def __init__(self, model: Any, kind: str = "") -> None:
        self._model, self._kind = model, kind
        if kind == "float32":
            self._model = copy.deepcopy(model).float()
        elif kind == "eager":
            self._model = copy.deepcopy(model)
            self._model.set_attn_implementation("eager")

    def prompts(self, tokens: torch.Tensor) -> list[list[Planes]]:
        """Compute prompts of one length together: the blocks of each."""
        with torch.inference_mode(), self._context():
            cache = self._model(input_ids=tokens, use_cache=True, logits_to_keep=1).past_key_values
        return [list(_blocks(cache.layers, number)) for number in range(len(tokens))]

    def _context(self) -> AbstractContextManager[object]:
        flags: Callable[..., AbstractContextManager[object]] = torch.backends.mkldnn.flags
        return flags(enabled=False) if self._kind == "native" else nullcontext()


def _blocks(layers: list[Any], number: int) -> Iterator[Planes]:
    """Blocks of one prompt: attention by BLOCK_TOKENS, then the linear states."""
    attention = [
        getattr(layer, name)[number].transpose(0, 1).to(torch.bfloat16).contiguous()
        for layer in layers
        for name in ("keys", "values")
        if getattr(layer, name, None) is not None
    ]
    for at in range(0, len(attention[0]), BLOCK_TOKENS):
        parts = (plane[at : at + BLOCK_TOKENS] for plane in attention)
        yield [("bfloat16", part.view(torch.int16).numpy().tobytes()) for part in parts]
    states = [
        state[number].float().numpy().tobytes()
        for layer in layers
        for state in getattr(layer, "recurrent_states", {}).values()
        if state is not None
    ]
    if states:
        yield [("float32", state) for state in states]


@dataclass
class Tally:
    """What was compared.

    Attributes:
        worst: Largest difference of each transfer, by type.
        alarms: Transfers with an altered block.
        blocks: Blocks compared.
        unequal: Blocks with a difference.
    """

    worst: dict[str, list[float]] = field(default_factory=dict)
    transfers: int = 0
    alarms: int = 0
    blocks: int = 0
    unequal: int = 0

    def add(self, received: list[Planes], computed: list[Planes]) -> None:
        """Compare the blocks of a transfer."""
        worst: dict[str, float] = {}
        for ours, theirs in zip(received, computed, strict=True):
            planes = tuple(Plane(dtype, len(data)) for dtype, data in ours)
            first, second = (memoryview(b"".join(d for _, d in each)) for each in (ours, theirs))
            found = differences(first, second, planes)
            self.blocks += 1
            self.unequal += any(found.values())
            worst = {k: max(found.get(k, 0.0), worst.get(k, 0.0)) for k in {*found, *worst}}
        self.transfers += 1
        self.alarms += is_altered(worst)
        for dtype, value in worst.items():
            self.worst.setdefault(dtype, []).append(value)

    def rows(self, name: str) -> Iterator[str]:
        """Rows of the table."""
        for dtype, values in self.worst.items():
            p50, p99, p999 = np.quantile(values, (0.5, 0.99, 0.999))
            limit = LIMITS[dtype]
            yield (
                f"| {name} | {dtype} | {self.transfers:,} | {self.unequal:,} of {self.blocks:,} "
                f"| {p50:.4f} | {p99:.4f} | {p999:.4f} | {max(values):.4f} "
                f"| {max(values) / limit:.2f} | {self.alarms} |"
            )


def run(model: str, pair: str, transfers: int, seconds: float) -> Tally:
    """Compare transfers until there are enough, or the time is over."""
    made = built(model)
    source, destination = Kernels(made), Kernels(made, pair)
    chance, tally = np.random.default_rng(1), Tally()
    ends_at = time.monotonic() + seconds
    while tally.transfers < transfers and time.monotonic() < ends_at:
        size = int(chance.choice(BATCHES))
        length = BLOCK_TOKENS * int(chance.integers(3, 13))
        tokens = torch.from_numpy(chance.integers(0, VOCABULARY, (size, length)))
        received = source.prompts(tokens)
        other = int(chance.choice([each for each in BATCHES if each <= size]))
        computed = [p for part in tokens.split(other) for p in destination.prompts(part)]
        for ours, theirs in zip(received, computed, strict=True):
            tally.add(ours, theirs)
    return tally


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="experts")
    parser.add_argument("--pair", choices=PAIRS, default="float32")
    parser.add_argument("--transfers", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    tally = run(asked.model, asked.pair, asked.transfers, asked.seconds)
    print(
        "| model, kernels | type | transfers | blocks that differ | p50 | p99 | p99.9 | largest "
        "| of the limit | alarms |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    print("\n".join(tally.rows(f"{asked.model}, {asked.pair}")))
    sys.exit(1 if tally.alarms else 0)


if __name__ == "__main__":
    main()
