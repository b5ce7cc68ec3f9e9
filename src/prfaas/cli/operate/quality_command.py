"""`prfaas quality`: a model's answers after its KV cache was rounded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from prfaas.core.codec.codecs import Quality
from prfaas.errors import PrfaasError

if TYPE_CHECKING:
    from prfaas.quality.compare import TextFindings

LOSSY = [each.value for each in Quality if each.is_lossy]
VOCABULARY_MAX = 4096
"""Tokens that recall and copying draw from."""


class InconclusiveError(PrfaasError):
    """No text needs its prefix: the model shows nothing about a codec."""


@click.command()
@click.argument("model")
@click.option(
    "--codec",
    "codecs",
    multiple=True,
    required=True,
    type=click.Choice(LOSSY),
    help="Rounding to compare; may be repeated.",
)
@click.option(
    "--pairs",
    default=12,
    type=click.IntRange(1, 4096),
    help="Pairs of a key and a value in a prefix to recall from.",
)
@click.option(
    "--tokens",
    default=64,
    type=click.IntRange(2, 65536),
    help="Tokens of a prefix to copy, or of a text.",
)
@click.option("--samples", default=16, type=click.IntRange(1, 10000), help="Texts of each kind.")
@click.option(
    "--vocabulary",
    type=click.IntRange(4, VOCABULARY_MAX),
    help="Draw from the first so many token ids; the model's, at most 4,096, if absent.",
)
@click.option(
    "--block-tokens",
    default=64,
    type=click.IntRange(1, 65536),
    help="Tokens of a block of the engines.",
)
@click.option(
    "--text",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A text, for the perplexity of later chunks.",
)
@click.option("--device", default="cpu", help="Such as cuda.")
@click.option("--json", "as_json", is_flag=True, help="All figures as JSON.")
def quality(
    model: str,
    codecs: tuple[str, ...],
    pairs: int,
    tokens: int,
    samples: int,
    vocabulary: int | None,
    block_tokens: int,
    text: Path | None,
    device: str,
    as_json: bool,
) -> None:
    """Compare the logits of MODEL with and without rounding of the KV cache of a prefix.

    MODEL is a folder with a checkpoint, or a name that transformers finds. The texts need their
    prefix: values to recall by their key, and tokens to copy. Each is compared beside a control
    whose cache is all zeros. Exit code 1 if no kind of text is conclusive: zeroing costs less than
    a nat a token, and the model recalls less than 95 %. That is so for a model with random weights.

    \b
    Examples:
      prfaas quality ./model --codec fp8 --codec kivi4
      prfaas quality ./model --codec kivi4 --text book.txt --tokens 2048 --device cuda
    """
    # torch takes seconds to import.
    from prfaas.quality.caches import copying, later_chunks, recall, rounded
    from prfaas.quality.compare import compare
    from prfaas.quality.transformers_model import load, text_tokens

    loaded = load(model, device)
    words = range(min(loaded.vocab_size, vocabulary or VOCABULARY_MAX))
    arms = {each: rounded(Quality(each), block_tokens) for each in codecs}
    seeds = range(samples)
    kinds = {
        "recall": [recall(words, pairs, max(1, pairs // 2), seed) for seed in seeds],
        "copying": [copying(words, tokens, seed) for seed in seeds],
    }
    if text is not None:
        kinds["text"] = later_chunks(text_tokens(model, text), tokens, tokens, samples)
    found = [compare(name, loaded, chosen, arms) for name, chosen in kinds.items()]
    click.echo(_as_json(found) if as_json else "\n".join(_as_table(found)))
    if not any(each.is_conclusive for each in found):
        raise InconclusiveError(
            "no text needs its prefix, so nothing is known about a codec; use a model that recalls"
        )


def _as_table(found: Sequence[TextFindings]) -> Iterable[str]:
    row = "{:<9} {:<18} {:>9} {:>8} {:>10} {:>8}"
    yield row.format("text", "cache", "KL, nats", "top-1", "perplexity", "recall")
    for each in found:
        for arm, score in each.scores.items():
            yield row.format(
                each.name,
                arm,
                f"{score.kl:.5f}",
                f"{score.agreement:.1%}",
                f"x{score.perplexity_ratio:.4g}",
                f"{score.recalled:.1%}",
            )
        yield f"{each.name}: {each.verdict} ({each.num_tokens} tokens)"


def _as_json(found: Sequence[TextFindings]) -> str:
    return json.dumps(
        [
            {
                "text": each.name,
                "tokens": each.num_tokens,
                "conclusive": each.is_conclusive,
                "lost_nats": each.lost_nats,
                "scores": {arm: asdict(score) for arm, score in each.scores.items()},
            }
            for each in found
        ],
        indent=2,
    )
