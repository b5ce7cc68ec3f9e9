"""Token counts in the client's usage."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.gateway.http.json_codec import JsonObject, as_count, as_object
from prfaas.gateway.telemetry.request_record import RequestRecord


@dataclass(slots=True)
class UsageCorrection:
    """Corrects the decode leg's counts.

    To the decode engine, blocks that came over the link are cached tokens. The client
    sees only tokens that were cached before its request: at most those that the prefill leg found,
    and where that leg failed half-way, at most those of the decode engine's pool. The tokens that a
    chat created in caches follow from that: the rest of the prompt, up to its last full block.

    Attributes:
        cached_max: Upper bound; None on the local path.
        decode_cached: What the decode leg found, once known.
        cache_end: Where the last whole block of the prompt ends, tokens; None while not known.
        num_moved: Tokens of the answer that the decode engine was given with its prompt.
    """

    record: RequestRecord
    cached_max: int | None = None
    decode_cached: int | None = None
    cache_end: int | None = None
    num_moved: int = 0

    def corrected(self, usage: object) -> JsonObject:
        """The final usage object of a decode leg, as the client gets it."""
        counts = self.shifted(usage)
        details = as_object(counts.get("prompt_tokens_details"))
        self.decode_cached = cached = as_count(details.get("cached_tokens"))
        if self.cached_max is not None:
            cached = min(cached, self.cached_max)
        num_prompt, num_output = counts.get("prompt_tokens"), counts.get("completion_tokens")
        self.record.counted(as_count(num_prompt), as_count(num_output), cached)
        quality = {"kv_quality": self.record.quality} if self.record.quality.is_lossy else {}
        return counts | {"prompt_tokens_details": self._details(details, cached)} | quality

    def _details(self, details: JsonObject, cached: int) -> JsonObject:
        """Details of an answer: null keys in a whole one, none in a stream, as in vLLM 0.32."""
        created = details.get("created_cache_tokens")
        if self.record.api == "chat":
            if created is not None:
                created = as_count(created) + (self.decode_cached or 0) - cached
            elif self.cache_end is not None:
                created = max(0, self.cache_end - cached)
        changed = {"cached_tokens": cached, "created_cache_tokens": created}
        if self.record.stream:
            kept = details | changed
            return {key: value for key, value in kept.items() if value is not None}
        return {"multimodal_tokens": None} | details | changed

    def shifted(self, usage: object) -> JsonObject:
        """Counts of an engine that continues, as if one engine had made the whole answer."""
        counts = as_object(usage)
        if not self.num_moved:
            return counts
        return counts | {
            "prompt_tokens": as_count(counts.get("prompt_tokens")) - self.num_moved,
            "completion_tokens": as_count(counts.get("completion_tokens")) + self.num_moved,
        }
