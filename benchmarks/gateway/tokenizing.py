"""CPU of a prompt's token ids and block hashes, with a vocabulary of 150,000.

    python -m benchmarks.gateway.tokenizing [--tokens 32000] [--block 16] [--rounds 15]

The vocabulary is Tekken's, which comes with `mistral_common`. Prompts are chats of this
repository's code and documents. Each round takes a new chat, sends it once more with another last
tenth ("nine tenths known"), and that once more as it is ("all known"). A cold thread has tokenised
nothing before, a warm one has served the rounds before. What is known is not made again. The last
rows are the new chat's tokens by `tokenizers`, which serves the models that `fastokens` does not,
by `fastokens` with most words seen before, and its hashes alone. Prints medians.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from prfaas.core.kv.blocks import CacheGroup, GroupKind, Layout
from prfaas.gateway.tokenization.known_prefixes import Naming
from prfaas.gateway.tokenization.text_encoder import Encoder, FastTokenizer

ROOT = Path(__file__).parents[2]
MARKERS = ("<|im_start|>", "<|im_end|>")
TURN_CHARS = 6000


def tekken() -> Any:
    """Mistral's vocabulary of 150,000 as a tokenizer of `transformers`."""
    import mistral_common
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    path = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    found = json.loads(path.read_text())
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in found["vocab"]}
    letters = bytes_to_unicode()
    written = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token in ranks:
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [(a, b) for a, b in cuts if a in ranks and b in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(written[a], written[b]) for a, b in pairs]
    vocabulary = {written[token]: rank for token, rank in ranks.items()}
    core = Tokenizer(models.BPE(vocabulary, merges, fuse_unk=False, ignore_merges=True))
    core.normalizer = normalizers.NFC()
    rule = Split(Regex(found["config"]["pattern"]), "isolated")
    core.pre_tokenizer = Sequence([rule, ByteLevel(add_prefix_space=False, use_regex=False)])
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in MARKERS])
    return PreTrainedTokenizerFast(tokenizer_object=core)


def chats(num_chars: int) -> Iterator[str]:
    """Chats of this repository's text in turns, none twice, as a template would write them."""
    files = sorted(
        p for p in ROOT.rglob("*") if p.suffix in (".md", ".py") and ".venv" not in p.parts
    )
    random.Random(1).shuffle(files)
    text = "\n".join(path.read_text() for path in files)
    for start in range(0, len(text) - num_chars, num_chars):
        turns = (text[i : i + TURN_CHARS] for i in range(start, start + num_chars, TURN_CHARS))
        yield "".join(f"{MARKERS[0]}user\n{turn}{MARKERS[1]}\n" for turn in turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--block", type=int, default=16, help="tokens to a block hash")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    tokenizer = tekken()
    encoder = Encoder(tokenizer, 3 * MARKERS[0]).settled()
    groups = (CacheGroup(0, GroupKind.FULL_ATTENTION, options.block, 1),)
    naming = Naming("salt", Layout(bytes(32), options.block, "0", groups))
    spent: dict[str, list[float]] = defaultdict(list)
    sizes: list[int] = []
    fast: FastTokenizer | None = None

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.thread_time()
        made = work()
        spent[name].append(1e3 * (time.thread_time() - began))
        return made

    def encode(name: str, text: str) -> Any:
        return timed(name, partial(encoder.encode, text, False, naming))[0]

    sample = next(chats(200_000))
    num_chars = round(len(sample) * options.tokens / len(tokenizer.encode(sample)))
    made = chats(num_chars)
    with ThreadPoolExecutor(1) as warm:
        for _ in range(options.rounds):
            text, other = next(made), next(made)
            longer = text[: num_chars * 9 // 10] + other[: num_chars // 10]
            with ThreadPoolExecutor(1) as cold:
                cold.submit(encode, "new, cold thread", f"0{text}").result()
            ids = warm.submit(encode, "new, warm thread", text).result()
            warm.submit(encode, "nine tenths known", longer).result()
            warm.submit(encode, "all known", longer).result()
            core = tokenizer.backend_tokenizer
            timed("tokens, `tokenizers`", lambda: core.encode_batch_fast([text]))  # noqa: B023
            fast = FastTokenizer(core).settled() if fast is None else fast
            timed("tokens, `fastokens`", partial(fast, text))
            timed("hashes", lambda: naming.hashes(ids))  # noqa: B023
            sizes.append(len(ids))
    print(f"{statistics.median(sizes):.0f} tokens, {num_chars} characters, {options.rounds} rounds")
    for name, times in spent.items():
        print(f"{name:20} {statistics.median(times):6.2f} ms  (least {min(times):.2f})")


if __name__ == "__main__":
    main()
