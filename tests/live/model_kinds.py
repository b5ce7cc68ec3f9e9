"""Tiny checkpoints with random weights, one for each kind of KV cache, for vLLM on the CPU.

Weights are scaled as those of the demo's checkpoint, so that answers hang on the cache.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from prfaas.engines.checkpoint import (
    ATTENTION_GAIN,
    DECAY_PER_TOKEN,
    EMBEDDING_GAIN,
    LOGIT_GAIN,
    MAX_MODEL_LEN,
    STATE_GAIN,
    VOCABULARY,
    WEIGHT_SPREAD,
    make_checkpoint,
    make_tokenizer,
    speak_in_letters,
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": WEIGHT_SPREAD,
    "tie_word_embeddings": False,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 256, "num_experts_per_tok": 2}
CHUNKED_KIND = "chunks (Llama 4)"
BLOCKS_AND_ONE_KIND = "windows of three blocks and a token (Cohere 2)"
"""vLLM adds a token to the window of Cohere 2; blocks have 128."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped queries (Llama)": ("llama", {"head_dim": 64}),
    "mixture of experts (Qwen3-MoE)": (
        "qwen3_moe",
        {"head_dim": 64, "num_experts": 8, "decoder_sparse_step": 1, **_EXPERTS},
    ),
    "sliding window (Gemma 3)": (
        "gemma3_text",
        {
            "head_dim": 64,
            "sliding_window": 512,
            "query_pre_attn_scalar": 64,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
    ),
    "sinks and windows (gpt-oss)": (
        "gpt_oss",
        {
            "head_dim": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "windows without positions (Cohere 2)": (
        "cohere2",
        {
            "head_dim": 64,
            "sliding_window": 400,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "logit_scale": 1.0,
            "tie_word_embeddings": True,
        },
    ),
    BLOCKS_AND_ONE_KIND: (
        "cohere2",
        {
            "head_dim": 64,
            "sliding_window": 384,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "logit_scale": 1.0,
            "tie_word_embeddings": True,
        },
    ),
    "windows in every layer (Mistral)": ("mistral", {"head_dim": 64, "sliding_window": 1024}),
    CHUNKED_KIND: (
        "llama4_text",
        {
            "head_dim": 64,
            "attention_chunk_size": 512,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 512,
            "no_rope_layers": [1, 1, 1, 0],
        },
    ),
    "latent, MLA (DeepSeek-V3)": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            **_EXPERTS,
        },
    ),
    "short convolution (LFM2)": (
        "lfm2",
        {
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
            "conv_dim": 256,
            "block_dim": 256,
            "block_ff_dim": 512,
            "conv_L_cache": 3,
        },
    ),
    "short convolution and experts (LFM2-MoE)": (
        "lfm2_moe",
        {
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "conv_L_cache": 3,
            "num_experts": 4,
            "num_dense_layers": 1,
            **_EXPERTS,
        },
    ),
}
_STATE_OUTPUTS = tuple(f"{layer}.out_proj.weight" for layer in ("conv", "self_attn", "linear_attn"))
STATE_KIND = "linear state (Qwen3-Next, the demo's)"
ALL_KINDS = (*KINDS, STATE_KIND)


def make_kind(kind: str, directory: Path) -> None:
    """Write a checkpoint of one of `ALL_KINDS`."""
    if kind == STATE_KIND:
        make_checkpoint(directory)
    else:
        make_model(*KINDS[kind], directory)


def make_model(model_type: str, fields: dict[str, Any], directory: Path) -> None:
    """Write a checkpoint whose answers hang on the cache.

    Args:
        model_type: Of its configuration.
        fields: Of its configuration, beside those of all kinds.
        directory: A new one.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

    directory.mkdir(parents=True)
    make_tokenizer(directory)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = CONFIG_MAPPING[model_type](**(_COMMON | fields | ids))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_input_embeddings().weight *= EMBEDDING_GAIN
        if not config.tie_word_embeddings:
            model.lm_head.weight *= LOGIT_GAIN
        for name, weight in model.named_parameters():
            if name.endswith("self_attn.o_proj.weight"):
                weight.mul_(ATTENTION_GAIN)
            elif name.endswith(_STATE_OUTPUTS):
                weight.mul_(STATE_GAIN)
            elif name.endswith("linear_attn.A_log"):
                slow, fast = (math.log(rate) for rate in DECAY_PER_TOKEN)
                weight.copy_(torch.linspace(slow, fast, weight.numel()))
    speak_in_letters(model, tokenizer)
    model.save_pretrained(directory)
