"""Chats that go on are tokenised from where they do, and have the tokens of the whole."""

from __future__ import annotations

import gc
import logging
import random
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from blake3 import blake3
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from prfaas.core.kv.blocks import CacheGroup, GroupKind, HashScheme, Layout
from prfaas.core.kv.hashes import NO_HASHES, Hashes
from prfaas.core.kv.naming.prompt_names import prompt_hashes
from prfaas.gateway.tokenization.known_prefixes import (
    SPAN_CHARS,
    KnownPrefixes,
    Marker,
    Naming,
    marker_of,
)
from prfaas.gateway.tokenization.text_encoder import CHECKED_EACH, Encoder
from tests.gateway.tokenizer_zoo import MARKERS, PIECES, ZOO, bpe, by_rules, tokenizer
from tests.instructions import counted

GROUPS = (CacheGroup(0, GroupKind.FULL_ATTENTION, 16, 64),)
LAYOUT = Layout(b"L" * 32, 16, "7", GROUPS)
PAGES = Layout(b"P" * 32, 16, "7", GROUPS, HashScheme.SGLANG_PAGES)
START, END, _ = MARKERS
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
NO_OLD_REASONING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning and loop.index0 > ns.last %}<think>\n{{ m.reasoning }}\n</think>\n"
    "{% endif %}"
    "{{ m.content | trim }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
SYSTEM_LAST = (
    "<|endoftext|>{% for m in messages if m.role != 'system' %}"
    "{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>"
    "{% else %}<|im_start|>{% if loop.last %}{{ messages[0].content }}\n\n{% endif %}"
    "{{ m.content }}{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "no old reasoning": NO_OLD_REASONING, "system last": SYSTEM_LAST}
Chat = list[dict[str, str]]


def rendered(chat: Chat, template: str) -> str:
    found = tokenizer("qwen").apply_chat_template(chat, chat_template=template, tokenize=False)
    return str(found)


def content(draw: random.Random) -> str:
    return "".join(draw.choices(PIECES, k=draw.choice((2, 300, 1500))))


def message(draw: random.Random, role: str) -> dict[str, str]:
    reasoning = content(draw) if role == "assistant" and draw.random() < 0.7 else ""
    return {"role": role, "content": content(draw), "reasoning": reasoning}


def conversations(draw: random.Random, count: int) -> list[Chat]:
    """Chats of which most go on from the one before: others are edited, cut or begun anew."""
    chat = [message(draw, "system"), message(draw, "user")]
    made: list[Chat] = []
    for _ in range(count):
        made.append(list(chat))
        chat += [message(draw, "assistant"), message(draw, draw.choice(("user", "tool")))]
        odd = draw.random()
        if odd < 0.15:
            chat[draw.randrange(len(chat))] = message(draw, "user")
        elif odd < 0.25:
            chat[0] = message(draw, "system")
        elif odd < 0.35:
            del chat[draw.randrange(2, len(chat)) :]
    return made


class Counting:
    """Notes the texts that a tokenizer gets."""

    def __init__(self, encoder: Encoder) -> None:
        self.texts: list[str] = []
        self._encode: Callable[..., array[int]] = encoder._fast or encoder._slowly
        encoder._fast = self  # type: ignore[assignment]

    def __call__(self, text: str, special: bool = False) -> array[int]:
        self.texts.append(text)
        return self._encode(text, special)


def encoder_for(name: str, template: str = CHATML) -> Encoder:
    chat = rendered([{"role": "user", "content": "x"}] * 3, template)
    return Encoder(tokenizer(name), chat).settled()


def whole(name: str, text: str, naming: Naming) -> tuple[array[int], Hashes]:
    ids = array("I", tokenizer(name).encode(text, add_special_tokens=False))
    assert naming.layout is not None
    return ids, prompt_hashes(naming.layout, ids, naming.cache_salt)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", ZOO)
def test_tokens_and_hashes_are_those_of_the_whole(name: str, template: str) -> None:
    draw = random.Random(f"{name} {template}")
    encoder = encoder_for(name, TEMPLATES[template])
    counting, num_chars = Counting(encoder), 0
    naming = Naming("salt", draw.choice((LAYOUT, PAGES)), "tenant")
    for chat in conversations(draw, 8):
        text = rendered(chat, TEMPLATES[template])
        assert encoder.encode(text, False, naming) == whole(name, text, naming)
        num_chars += len(text)
    if encoder.known is None:
        assert name == "single words"
    else:
        assert sum(map(len, counting.texts)) < num_chars


def words(draw: random.Random, num_chars: int) -> str:
    return "".join(draw.choices(("the ", "cat ", "sat. ", "12 ", "mat\n"), k=num_chars // 4))


def long_chat(num_turns: int, seed: int = 0) -> Chat:
    draw = random.Random(seed)
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": words(draw, 5000)} for i in range(num_turns)]


def test_a_turn_costs_what_is_new_of_it() -> None:
    """Characters that are tokenised, tokens that are hashed, instructions, and objects that each
    garbage collection looks at as long as the request is open."""
    encoder, naming = encoder_for("qwen"), Naming("salt", LAYOUT, "tenant")
    counting = Counting(encoder)
    chat, spent = long_chat(81), []
    for end in range(1, 82, 2):
        text = rendered(chat[:end], CHATML)
        counting.texts.clear()
        (ids, hashes), instructions = counted(lambda: encoder.encode(text, False, naming))  # noqa: B023
        spent.append((sum(map(len, counting.texts)), instructions))
    assert (len(ids) // 16, len(text) > 400_000) == (len(hashes), True)
    assert max(num_chars for num_chars, _ in spent) < 2 * 6000 + SPAN_CHARS
    early, late = spent[10][1], spent[-1][1]
    # A part that is known takes a hundred; to hash 60 messages of 5,000 characters takes 150,000.
    assert late < early + 110 * (81 - 21), (early, late)
    assert (len(hashes) > 5000, len(gc.get_referents(hashes)) < 3) == (True, True)


def test_a_new_salt_or_layout_or_tenant_knows_nothing() -> None:
    encoder = encoder_for("qwen")
    counting, text = Counting(encoder), rendered(long_chat(5), CHATML)
    namings = [
        Naming(salt, layout, tenant)
        for salt in ("a", "b")
        for layout in (LAYOUT, PAGES, None)
        for tenant in ("one", "other")
    ]
    for naming in namings:
        encoder.encode(text, False, naming)
    assert counting.texts == [text] * len(namings)
    counting.texts.clear()
    for naming in namings:
        encoder.encode(text, False, naming)
    assert max(map(len, counting.texts)) < 6000


def known_of(bytes_max: int) -> KnownPrefixes:
    return KnownPrefixes(Marker(START, 1), bytes_max)


def keep(known: KnownPrefixes, tenant: str, number: int) -> str:
    """Have a tenant send a text of two parts, of which the first can be known, some 4 KiB."""
    text = f"{number}{'x' * SPAN_CHARS}{START}y"
    naming = Naming("salt", None, tenant)
    found = known.find(text, naming)
    known.keep(text, naming, found, array("I", [0] * 1000 + [1, 2]), NO_HASHES)
    return text


def test_a_tenant_that_sends_much_forgets_its_own_alone() -> None:
    known = known_of(100_000)
    kept = [keep(known, "small", number) for number in range(5)]
    for number in range(500):
        keep(known, "large", number)
        assert known.num_bytes <= 100_000
    for text in kept:
        assert known.find(text, Naming("salt", None, "small")).num_known == 1
    assert known.find(keep(known, "large", 0), Naming("salt", None, "large")).num_known == 1


def test_what_is_used_is_kept() -> None:
    known = known_of(50_000)
    first = keep(known, "a", 0)
    for number in range(1, 100):
        keep(known, "a", number)
        assert keep(known, "a", 0) == first
        assert known.find(first, Naming("salt", None, "a")).num_known == 1


def test_a_difference_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    encoder, naming = encoder_for("qwen"), Naming("salt", LAYOUT, "tenant")
    text = rendered(long_chat(9), CHATML)
    right = encoder.encode(text, False, naming)
    assert encoder.known is not None
    for owned in encoder.known._by_tenant.values():
        for span in owned.spans.values():
            span.token_ids[0] = 5
    made = [encoder.encode(text, False, naming)[0] for _ in range(CHECKED_EACH)]
    assert made[0] != right[0]
    assert made[-1] == right[0]
    assert encoder.known is None
    assert encoder.encode(text, False, naming) == right
    assert "known_prefix_differs" in caplog.text
    assert "cat" not in caplog.text
    assert caplog.records[-1].levelno == logging.ERROR


def core_with(*tokens: AddedToken) -> Any:
    core = bpe(by_rules(r"\s+|\S+"))
    core.add_tokens(list(tokens))
    return core


@pytest.mark.parametrize(
    ("token", "more"),
    [
        (AddedToken("<m>", lstrip=True, normalized=False), ()),
        (AddedToken("<m>", normalized=True), ()),
        (AddedToken("<m>", normalized=False), (AddedToken("a<m>", normalized=False),)),
        (AddedToken("<m>", normalized=False), (AddedToken("a<", normalized=False),)),
        (AddedToken("<m>", normalized=False), (AddedToken("word", single_word=True),)),
        (AddedToken("<m<", normalized=False), ()),
    ],
)
def test_markers_that_are_no_places_to_cut_at(token: AddedToken, more: tuple[AddedToken]) -> None:
    chat = f"{token.content}a{token.content}b"
    found = marker_of(core_with(token, *more), chat)
    assert found is None or found.text != token.content


def test_the_marker_is_the_one_that_messages_begin_with() -> None:
    tokens = [AddedToken(f"<{name}>", normalized=False) for name in ("bos", "eot", "head", "end")]
    found = marker_of(core_with(*tokens), "<bos><head>a<end>x<eot><head>b<end>y<eot>")
    assert found is not None
    assert found.text == "<head>"
    assert marker_of(core_with(*tokens), "no markers") is None
    core = PreTrainedTokenizerFast(tokenizer_object=core_with(*tokens)).backend_tokenizer
    core.encode_special_tokens = True
    assert marker_of(core, "<head>a<head>b") is None


def test_nothing_of_a_text_itself_is_kept() -> None:
    encoder = encoder_for("qwen")
    text = rendered(long_chat(3), CHATML)
    encoder.encode(text, False, Naming("salt", LAYOUT, "tenant"))
    assert encoder.known is not None
    [owned] = encoder.known._by_tenant.values()
    key, span = next(reversed(owned.spans.items()))
    prefix = text[: text.index(START, SPAN_CHARS)]
    facts = Naming("salt", LAYOUT, "tenant").key
    begun = blake3(facts.encode() + prefix.encode())
    assert (key, type(span.token_ids)) == (begun.digest(), array)
