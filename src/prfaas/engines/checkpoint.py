"""A small random-weight hybrid checkpoint, for machines where no weights can be had.

A Qwen3-Next of 9 million parameters: three Gated-DeltaNet layers to one full-attention layer, a
mixture of experts, a byte-level tokenizer and a ChatML template. Its answers mean nothing. Weights
drawn alike everywhere would hardly look at the KV cache: zeroing all of it changed perplexity by
0.2 %. Here they are scaled so that answers hang on far context: zeroing it costs several nats
a token, and one lost block changes the answer (`tests/engines/test_checkpoint.py`).
"""

from __future__ import annotations

import json
import math
import string
import sys
from pathlib import Path
from typing import Any

from prfaas.errors import ConfigError

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_MODEL_LEN = 16384
VOCABULARY = 320
WEIGHT_SPREAD = 0.08
"""Wide enough that greedy output is not one repeated token."""
EMBEDDING_GAIN = 0.2
"""The weight of a token itself is small ..."""
ATTENTION_GAIN, STATE_GAIN = 8.0, 4.0
"""... beside what attention and linear state say of the tokens before it."""
QUERY_GAIN = 4.0
"""Added to the scale of queries: attention picks few tokens, near or far, instead of their mean."""
DECAY_PER_TOKEN = (0.0005, 0.05)
"""Slowest and fastest head: linear state forgets within some 20 to 2,000 tokens."""
LOGIT_GAIN = 3.0
"""Parts the first choice from the second, so that rounding does not choose."""
HYBRID = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}


def make_checkpoint(directory: Path, seed: int = 0, *, weights: bool = True) -> None:
    """Write the checkpoint to `directory`, unless one is there; ConfigError if there is something
    else in `directory`.

    Args:
        weights: Without them it serves timing engines, in a tenth of the time.
    """
    if (directory / "config.json").exists():
        return
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty and holds no checkpoint; name another place")
    partial = directory.with_name(f"{directory.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    make_tokenizer(partial)
    if weights:
        _save_weights(partial, seed)
    else:
        config = {"model_type": "qwen3_next", "vocab_size": VOCABULARY}
        (partial / "config.json").write_text(json.dumps(config), encoding="utf-8")
    partial.rename(directory)


def make_tokenizer(directory: Path) -> None:
    """Write a byte-level tokenizer with a chat template: one token a byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(alphabet)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    directory.mkdir(parents=True, exist_ok=True)
    core.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": MAX_MODEL_LEN,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _save_weights(directory: Path, seed: int) -> None:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3NextConfig, Qwen3NextForCausalLM

    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=WEIGHT_SPREAD,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **HYBRID,
    )
    torch.manual_seed(seed)
    model = Qwen3NextForCausalLM(config).to(torch.bfloat16)
    _hang_on_context(model)
    speak_in_letters(model, tokenizer)
    model.save_pretrained(directory)


def _hang_on_context(model: Any) -> None:
    """Scale weights so that the KV cache determines the next token."""
    import torch

    with torch.no_grad():
        model.model.embed_tokens.weight *= EMBEDDING_GAIN
        model.lm_head.weight *= LOGIT_GAIN
        for layer in model.model.layers:
            attention = getattr(layer, "self_attn", None)
            if attention is not None:
                attention.o_proj.weight *= ATTENTION_GAIN
                attention.q_norm.weight += QUERY_GAIN
                continue
            state = layer.linear_attn
            state.out_proj.weight *= STATE_GAIN
            slow, fast = (math.log(rate) for rate in DECAY_PER_TOKEN)
            state.A_log.copy_(torch.linspace(slow, fast, state.A_log.numel()))


def speak_in_letters(model: Any, tokenizer: Any) -> None:
    """Mute everything but letters, digits and spaces, so that answers can be shown."""
    import torch

    spoken = tokenizer.convert_tokens_to_ids(
        tokenizer.tokenize(string.ascii_letters + string.digits + "  ,.")
    )
    mute = torch.ones(VOCABULARY, dtype=torch.bool)
    mute[spoken] = False
    with torch.no_grad():
        model.lm_head.weight[mute] = 0.0


if __name__ == "__main__":
    make_checkpoint(Path(sys.argv[-1]), weights="--tokenizer-only" not in sys.argv)
