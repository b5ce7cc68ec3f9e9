"""Train a small hybrid on associative recall: python -m benchmarks.quality.train FOLDER

LFM2's architecture: a short convolution joins a key with the value after it, and two layers of
attention find the pair. Minutes of a core; set OMP_NUM_THREADS=1 beside other work. The weights go
to FOLDER, for `prfaas quality FOLDER --codec fp8 --codec kivi4 --vocabulary 64`.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import transformers

from prfaas.quality.caches import recall

VOCABULARY, PAIRS, ASKED, BATCH, STEPS_MAX = 64, 12, 6, 64, 6000
GOOD_LOSS = 0.01
"""Mean loss of a value, nats, at which training ends."""


def config() -> Any:
    """Return the shape of the model: a layer of convolution, and two of attention."""
    return transformers.Lfm2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention", "full_attention"],
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids, and labels: the values that are asked for."""
    tokens, labels = [], []
    for number in range(BATCH):
        seed = 10**6 + step * BATCH + number
        sample = recall(range(VOCABULARY), PAIRS, ASKED, seed)
        whole = [*sample.prefix, *sample.rest]
        wanted = [-100] * len(whole)
        for at in sample.asked:
            wanted[len(sample.prefix) + at] = sample.rest[at]
        tokens.append(whole)
        labels.append(wanted)
    return torch.tensor(tokens), torch.tensor(labels)


def train(folder: str) -> None:
    """Train until the loss is good, and save the weights."""
    torch.manual_seed(0)
    model = transformers.Lfm2ForCausalLM(config())
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    began, mean = time.monotonic(), 5.0
    for step in range(STEPS_MAX):
        tokens, labels = batch(step)
        loss = model(input_ids=tokens, labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        mean += 0.1 * (float(loss) - mean)
        if step % 50 == 0:
            seconds = time.monotonic() - began
            print(f"step {step}: loss {mean:.4f}, {seconds:.0f} s", flush=True)
        if mean < GOOD_LOSS:
            break
    model.to(torch.bfloat16).save_pretrained(folder)
    print(f"{step + 1} steps, loss {mean:.4f}, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    train(sys.argv[1])
