"""Small tokenizers of the kinds that models have, made on the spot."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)
MISTRAL = CASED + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
MARKERS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
PIECES = (
    *MARKERS,
    *("the", "cat", "mat", "Foo", "BAR", "it's", "1", "12345", "Ωσ", "ß", "ﬁ", "ing", "x", "İ"),
    *(" ", " ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\x1c", "\u200d", "▁", "Ġ"),
    *(".", ",", "'", "!?", "<", "|", ">", "<|", "|>", "/", "(", "“", "_", "-"),
    *(
        "e\u0301",
        "\u0301",
        "\u0308",
        "é",
        "你好",
        "。",
        "東京",
        "한",
        "\u1100",
        "👩‍👧",
        "\U0001f600",
        "ा",
        "ด",
    ),
    *("<mask>", "<end>", "[UNK]", "<unk>", "the cat sat", "Foo bar"),
)
"""Parts of texts that tokenizers disagree about."""
CORPUS = [
    "The cat sat on the mat, and that's what they've said 12,345 times.\n\nIs it so? Yes: it is.\n",
    "def main(argument):\n    return [argument, 'text']  # the comment\n\n\nclass Thing:\n\tpass\n",
    "Zwölf Boxkämpfer jagen Viktor.  東京は日本の首都です。\n你好,世界。一二三四五\nПривет, мир!",
] * 3

Build = Callable[[], Tokenizer]


def _trained(model: Any, trainer: Any, pre: Any, normalizer: Any = None) -> Tokenizer:
    core = Tokenizer(model)
    core.normalizer, core.pre_tokenizer = normalizer, pre
    core.train_from_iterator(CORPUS, trainer)
    return core


def bpe(pre: Any, normalizer: Any = None) -> Tokenizer:
    """Byte-level BPE behind a pre-tokenizer."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, min_frequency=1, show_progress=False
    )
    return _trained(models.BPE(), trainer, pre, normalizer)


def by_rules(*rules: str, behavior: str = "isolated", invert: bool = False) -> Any:
    """A pre-tokenizer that splits by regular expressions, then writes bytes."""
    splits = [pre_tokenizers.Split(Regex(rule), behavior, invert) for rule in rules]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, last])


def _llama3() -> Tokenizer:
    core = bpe(by_rules(LLAMA3))
    core.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", core.get_vocab_size())]
    )
    return core


def _bytes_alone() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return core


def _bert() -> Tokenizer:
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    core = _trained(
        models.WordPiece(unk_token="[UNK]"),
        trainer,
        pre_tokenizers.BertPreTokenizer(),
        normalizers.BertNormalizer(),
    )
    core.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return core


def _unigram(scheme: str, split: bool) -> Tokenizer:
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    pre = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    return _trained(models.Unigram(), trainer, pre, normalizers.NFKC())


def _llama2() -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>"], min_frequency=1, show_progress=False
    )
    prepend = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _trained(models.BPE(unk_token="<unk>", fuse_unk=True), trainer, None, prepend)


def _with(build: Build, *tokens: AddedToken) -> Build:
    def extended() -> Tokenizer:
        core = build()
        core.add_tokens(list(tokens))
        return core

    return extended


def _qwen() -> Tokenizer:
    return bpe(by_rules(QWEN), normalizers.NFC())


ZOO: dict[str, Build] = {
    "bytes": _bytes_alone,
    "qwen": _qwen,
    "llama3": _llama3,
    "mistral": lambda: bpe(by_rules(MISTRAL)),
    "removed": lambda: bpe(by_rules(LLAMA3, behavior="removed", invert=True)),
    "deepseek": lambda: bpe(by_rules(*DEEPSEEK)),
    "gpt2": lambda: bpe(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "roberta": lambda: bpe(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "bert": _bert,
    "unigram": lambda: _unigram("always", split=True),
    "unigram-first": lambda: _unigram("first", split=True),
    "spaces": _with(_qwen, AddedToken("  "), AddedToken("\n"), AddedToken(" ")),
    "stripping": _with(
        _qwen,
        AddedToken("<mask>", lstrip=True, normalized=False),
        AddedToken("<end>", rstrip=True, normalized=False),
    ),
    "unsplit": lambda: bpe(pre_tokenizers.ByteLevel(use_regex=False, add_prefix_space=False)),
    "unsplit-first": lambda: _unigram("first", split=False),
    "llama2": _llama2,
    "unknown rule": lambda: bpe(by_rules(r"\p{L}+ \p{L}+|\p{L}+|\s+|[^\s\p{L}]+")),
    "half a rule": lambda: bpe(by_rules(CASED.split("|", 1)[0] + r"|\s+")),
    "strip": lambda: bpe(by_rules(QWEN), normalizers.Strip()),
    "rewritten early": lambda: bpe(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.ByteLevel(use_regex=False),
                pre_tokenizers.Split(Regex(QWEN), "isolated"),
            ]
        )
    ),
    "words as tokens": _with(_qwen, AddedToken("the cat"), AddedToken("Foo bar", normalized=False)),
    "greedy words": _with(_qwen, AddedToken("cat", rstrip=True)),
    "single words": _with(_qwen, AddedToken("mat", single_word=True)),
}


@cache
def tokenizer(name: str) -> Any:
    """A tokenizer of `transformers`, with role markers."""
    core = ZOO[name]()
    core.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in MARKERS])
    return PreTrainedTokenizerFast(tokenizer_object=core)
