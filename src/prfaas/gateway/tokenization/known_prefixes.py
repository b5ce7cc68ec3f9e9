"""Tokens and block hashes of the beginnings of texts that came before.

A text is cut before markers of the chat template: added tokens that a tokenizer finds before it
does anything else. What stands before such a marker has the same tokens whatever follows, and what
follows has the same tokens whatever stood before. A part of a text is found again only by the
BLAKE3 of its tenant's salt and of all text up to its end. So a template that writes earlier
messages otherwise, and a client that changes them, have their texts made again from there on.
"""

from __future__ import annotations

import itertools
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from blake3 import blake3

from prfaas.core.kv.blocks import Layout
from prfaas.core.kv.hashes import NO_HASHES, Hashes
from prfaas.core.kv.naming.prompt_names import prompt_hashes

SPAN_CHARS = 2048
"""Least characters of a part. Less is found again more often; each part takes a microsecond or
two, found or not."""
BYTES_MAX = 256 * 2**20
"""Memory of all parts together: 60 million tokens, or 38 million in blocks of 16."""
_SPAN_BYTES = 400
"""Key and objects of a part, and their places in a table."""


@dataclass(frozen=True, slots=True)
class Naming:
    """The names of a prompt's blocks."""

    cache_salt: str
    layout: Layout | None = None
    """Layout to hash for; None for no hashes."""
    tenant: str = ""
    """Whose prompt it is."""

    def hashes(self, token_ids: Sequence[int], known: Hashes = NO_HASHES) -> Hashes:
        """Hashes of all whole blocks, of which `known` are the first."""
        if self.layout is None:
            return NO_HASHES
        return prompt_hashes(self.layout, token_ids, self.cache_salt, known)

    @property
    def span(self) -> int:
        """Tokens of a hash; 1 without hashes."""
        return 1 if self.layout is None else self.layout.tokens_per_hash

    @property
    def key(self) -> str:
        """All that the names depend on besides the tokens."""
        if (layout := self.layout) is None:
            return repr((self.cache_salt,))
        facts = (layout.layout_id, layout.tokens_per_hash, layout.hash_seed, layout.hash_scheme)
        return repr((self.cache_salt, *facts))


@dataclass(frozen=True, slots=True)
class Marker:
    """An added token before which texts are cut."""

    text: str
    token_id: int


def marker_of(core: Any, chat: str) -> Marker | None:
    """Return the marker that a rendered chat has most often of those before which texts can be cut;
    None if there is none.

    Args:
        core: A `tokenizers.Tokenizer`.
        chat: Several messages, by the model's template.
    """
    added = core.get_added_tokens_decoder()
    if core.encode_special_tokens or any(token.single_word for token in added.values()):
        return None
    texts = [token.content for token in added.values()]
    ends = {text[start:] for text in texts for start in range(1, len(text))}
    inner = {end[:length] for end in ends for length in range(1, len(end) + 1)}
    found = [
        Marker(token.content, token_id)
        for token_id, token in added.items()
        # No other one that begins before it can reach into it.
        if not (token.normalized or token.lstrip or token.content[:1].isspace())
        and token.content in chat
        and token.content not in inner
        and not any(token.content[:length] in ends for length in range(1, len(token.content) + 1))
    ]
    # Of several, the one that a message begins with.
    return max(found, key=lambda m: (chat.count(m.text), -chat.find(m.text)), default=None)


@dataclass(frozen=True, slots=True)
class _Span:
    """A part of a text: its tokens, and the block hashes that end in it."""

    token_ids: array[int]
    hashes: bytes

    @property
    def num_bytes(self) -> int:
        return _SPAN_BYTES + self.token_ids.itemsize * len(self.token_ids) + len(self.hashes)


@dataclass(slots=True)
class Beginning:
    """A text as far as it is known."""

    cuts: list[tuple[int, bytes]]
    """Place where parts of the whole text end, characters, and their keys."""
    num_known: int = 0
    """Parts that are known, the first ones."""
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    """Their tokens."""
    hashes: Hashes = NO_HASHES
    """Hashes of their whole blocks."""

    @property
    def end(self) -> int:
        """End of the known parts, characters."""
        return self.cuts[self.num_known - 1][0] if self.num_known else 0


class _Owned:
    """The parts of one tenant, the least recently used first."""

    def __init__(self) -> None:
        self.spans: OrderedDict[bytes, _Span] = OrderedDict()
        self.num_bytes = 0

    def drop_oldest(self) -> int:
        """Forget a part; return the bytes that it took."""
        size = self.spans.popitem(last=False)[1].num_bytes
        self.num_bytes -= size
        return size


class KnownPrefixes:
    """Parts of texts by tenant. Threads may share it.

    When memory is full, the tenant that takes most of it loses what it used least recently: nobody
    can have another tenant's parts forgotten that takes less than itself.

    Args:
        marker: Where texts are cut.
        bytes_max: Memory of all parts together, bytes.
    """

    def __init__(self, marker: Marker, bytes_max: int = BYTES_MAX) -> None:
        self._marker, self._bytes_max = marker, bytes_max
        self._by_tenant: dict[str, _Owned] = {}
        self._lock = threading.Lock()
        self.num_bytes = 0

    def find(self, text: str, naming: Naming) -> Beginning:
        """Return the known beginning of a text."""
        found, hashes = Beginning(self._cuts(text, naming.key)), bytearray()
        with self._lock:
            spans = self._tenant(naming.tenant).spans
            for _, key in found.cuts:
                if (span := spans.get(key)) is None:
                    break
                found.num_known += 1
                found.token_ids.extend(span.token_ids)
                hashes += span.hashes
        found.hashes = Hashes(bytes(hashes))
        return found

    def keep(
        self,
        text: str,
        naming: Naming,
        known: Beginning,
        token_ids: array[int],
        hashes: Hashes,
    ) -> None:
        """Remember all parts of a text.

        Args:
            known: Its beginning, as found.
            token_ids: Tokens of the whole text.
            hashes: Hashes of all its whole blocks.
        """
        if not known.cuts:
            return
        made = self._made(text, known, token_ids)
        parts: list[_Span | None] = [None] * known.num_known
        for start, end in itertools.pairwise([len(known.token_ids), *made]):
            names = hashes[start // naming.span : end // naming.span]
            parts.append(_Span(token_ids[start:end], names.data))
        with self._lock:
            owned = self._tenant(naming.tenant)
            # What all other parts continue is forgotten last.
            for (_, key), span in reversed(list(zip(known.cuts, parts, strict=False))):
                if key in owned.spans:
                    owned.spans.move_to_end(key)
                elif span is not None:
                    owned.spans[key] = span
                    owned.num_bytes += span.num_bytes
                    self.num_bytes += span.num_bytes
            self._shrink()

    def _tenant(self, name: str) -> _Owned:
        return self._by_tenant.setdefault(name, _Owned())

    def _made(self, text: str, known: Beginning, token_ids: array[int]) -> list[int]:
        """Ends of the parts that are not known, tokens; none if the tokens have other markers than
        the text."""
        if known.num_known == len(known.cuts):
            return []
        start, begin, marker = len(known.token_ids), known.end, self._marker.text
        numbers = np.frombuffer(token_ids, np.uint32)[start:]
        places = np.flatnonzero(numbers == self._marker.token_id)
        counts: list[int] = []
        for end, _ in known.cuts[known.num_known :]:
            counts.append(text.count(marker, begin, end))
            begin = end
        if len(places) != sum(counts) + text.count(marker, begin):
            return []
        return [start + int(places[count]) for count in itertools.accumulate(counts)]

    def _shrink(self) -> None:
        while self.num_bytes > self._bytes_max:
            largest = max(self._by_tenant, key=lambda name: self._by_tenant[name].num_bytes)
            self.num_bytes -= self._by_tenant[largest].drop_oldest()
            if not self._by_tenant[largest].spans:
                del self._by_tenant[largest]

    def _cuts(self, text: str, naming: str) -> list[tuple[int, bytes]]:
        """Ends of the parts, and the digests of all text up to them."""
        digest = blake3(naming.encode())
        cuts: list[tuple[int, bytes]] = []
        start = 0
        while (end := text.find(self._marker.text, start + SPAN_CHARS)) >= 0:
            digest.update(text[start:end].encode("utf-8", "surrogatepass"))
            cuts.append((end, digest.digest()))
            start = end
        return cuts
