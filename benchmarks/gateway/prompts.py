"""Prompts of real words, and a tokenizer like those of large models, trained on the spot."""

from __future__ import annotations

import json
import random
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORD_RULE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen's."""
MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 16_000
TURN_TOKENS = 2000
TOKENS_MAX = 1_000_000


def make_checkpoint(directory: Path) -> None:
    """Byte-level BPE over this repository's text and code, with a ChatML template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = Sequence(
        [Split(Regex(WORD_RULE), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    files = [
        str(path) for where in ("docs", "src", "tests") for path in (ROOT / where).rglob("*.*")
    ]
    core.train([name for name in files if name.endswith((".md", ".py"))], trainer)
    core.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in MARKERS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=MARKERS[2], model_max_length=TOKENS_MAX
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    config = {"model_type": "llama", "vocab_size": len(tokenizer)}
    config |= {"architectures": ["LlamaForCausalLM"], "eos_token_id": tokenizer.eos_token_id}
    (directory / "config.json").write_text(json.dumps(config))


class Prompts:
    """Conversations of a given length, never the same twice."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoTokenizer

        text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
        self._words = text.split()
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        sample = " ".join(random.Random(0).choices(self._words, k=20_000))
        self._words_per_token = 20_000 / len(tokenizer.encode(sample))
        self._draw = random.Random(1)

    def text(self, num_tokens: int) -> str:
        """Words of about that many tokens."""
        count = max(1, round(num_tokens * self._words_per_token))
        return " ".join(self._draw.choices(self._words, k=count))

    def conversation(self, num_tokens: int) -> list[dict[str, str]]:
        """Turns of up to 2,000 tokens, a user's the last."""
        count = max(1, num_tokens // TURN_TOKENS) | 1
        roles = ("user", "assistant")
        return [
            {"role": roles[turn % 2], "content": self.text(num_tokens // count)}
            for turn in range(count)
        ]


def body(model: str, messages: list[dict[str, str]], num_output: int) -> bytes:
    """A streamed chat request."""
    return json.dumps(
        {"model": model, "messages": messages, "max_tokens": num_output, "stream": True}
    ).encode()
