"""Next step of an instance, and its duration: chunked prefill and a decode batch.

A step computes one chunk of one prompt, first come first served, and one token of every sequence
that decodes. It takes the chunk's time and the batch's step time together. A sequence that has all
blocks of its prompt but the last, partial one decodes at once: so few tokens ride in a decode step
at no cost of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from prfaas.engines.timing.profile import InstanceProfile


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and its answers."""

    num_prompt_tokens: int
    num_output_max: int
    """Tokens of each answer, at least 1."""
    width: int = 1
    """Answers that are decoded side by side."""
    hit_tokens: int = 0
    """Prefix that need not be computed."""
    num_computed: int = 0
    """Tokens of the prompt that are there."""
    num_output: int = 0
    """Tokens of each answer so far."""

    @property
    def is_done(self) -> bool:
        """Return True if all tokens are there."""
        return self.num_output >= self.num_output_max


@dataclass(frozen=True, slots=True)
class Step:
    """One step."""

    duration_ns: int
    """Time that it takes."""
    prefill: Sequence | None
    """Sequence whose chunk is computed, if any."""
    end_token: int
    """Place where that chunk ends, tokens from the start of the prompt."""
    decoding: list[Sequence]
    """Sequences that get a token at the end, also those that end their prefill with it."""


class Scheduler:
    """The queue and the batch of one instance; no clock.

    Args:
        on_start: Called with a sequence whose prefill is about to start; it may have more cached
            by now than when it was added.
    """

    def __init__(
        self, profile: InstanceProfile, on_start: Callable[[Sequence], None] = lambda _: None
    ) -> None:
        self._profile, self._on_start = profile, on_start
        self._span = profile.layout.boundary_tokens
        self._waiting: deque[Sequence] = deque()
        self._prefilling: Sequence | None = None
        self._running: dict[Sequence, None] = {}
        self.kv_used_bytes = 0

    @property
    def kv_usage_ratio(self) -> float:
        """Share of the KV capacity that running sequences use; 0 without a limit. What is cached
        and unused counts as free, as in vLLM."""
        capacity = self._profile.kv_capacity_bytes
        return min(1.0, self.kv_used_bytes / capacity) if capacity else 0.0

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their first step."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that are computed."""
        return len(self._running) + (self._prefilling is not None)

    @property
    def num_answers(self) -> int:
        """Answers of these: vLLM counts each of them as a request."""
        prefilling = self._prefilling
        return sum(s.width for s in self._running) + (prefilling.width if prefilling else 0)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove an ended or abandoned sequence; no effect if it is unknown."""
        if sequence in self._running:
            del self._running[sequence]
        elif sequence is self._prefilling:
            self._prefilling = None
        else:
            if sequence in self._waiting:
                self._waiting.remove(sequence)
            return
        self.kv_used_bytes -= self._kv_bytes(sequence)

    def begin_step(self) -> Step | None:
        """Return the next step; None if idle."""
        self._admit()
        prefill, end_token, duration_ns = self._prefilling, 0, 0
        if prefill is not None:
            end_token = self._chunk_end(prefill)
            duration_ns = self._chunk_ns(prefill, end_token)
        decoding = list(self._running)
        batch = sum(sequence.width for sequence in decoding)
        if batch:
            held = sum((s.num_prompt_tokens + s.num_output) * s.width for s in decoding)
            duration_ns += self._profile.step_ns(batch, held / batch)
        if prefill is not None and end_token == prefill.num_prompt_tokens:
            decoding.append(prefill)
        if prefill is None and not decoding:
            return None
        return Step(max(duration_ns, 1), prefill, end_token, decoding)

    def end_step(self, step: Step) -> list[Sequence]:
        """A step is over; returns sequences that got a token, without those that were removed
        meanwhile."""
        prefill = step.prefill
        if prefill is not None and prefill is self._prefilling:
            prefill.num_computed = step.end_token
            if step.end_token == prefill.num_prompt_tokens:
                self._prefilling = None
                self._running[prefill] = None
        got = [sequence for sequence in step.decoding if sequence in self._running]
        for sequence in got:
            sequence.num_computed = sequence.num_prompt_tokens
            sequence.num_output += 1
            if sequence.is_done:
                self.remove(sequence)
        return got

    def _admit(self) -> None:
        """Start whoever rides in a decode step, and the oldest of the others."""
        for sequence in list(self._waiting):
            rides = self._rides(sequence)
            if not rides:
                if self._prefilling is not None:
                    continue
                self._on_start(sequence)
                rides = self._rides(sequence)
            if not self._has_room(sequence):
                return
            self._waiting.remove(sequence)
            self.kv_used_bytes += self._kv_bytes(sequence)
            sequence.num_computed = sequence.hit_tokens
            if rides:
                self._running[sequence] = None
            else:
                self._prefilling = sequence

    def _rides(self, sequence: Sequence) -> bool:
        num_new = sequence.num_prompt_tokens - sequence.hit_tokens
        return sequence.hit_tokens > 0 and num_new <= self._span

    def _has_room(self, sequence: Sequence) -> bool:
        if not self.num_running:
            return True
        width = sum(s.width for s in self._running)
        width += self._prefilling.width if self._prefilling else 0
        capacity = self._profile.kv_capacity_bytes
        fits = capacity is None or self.kv_used_bytes + self._kv_bytes(sequence) <= capacity
        return fits and width + sequence.width <= self._profile.batch_max

    def _kv_bytes(self, sequence: Sequence) -> int:
        output = sequence.num_output_max * sequence.width
        return self._profile.costs.kv_bytes(sequence.num_prompt_tokens + output)

    def _chunk_end(self, sequence: Sequence) -> int:
        """Chunks end where state can be kept: at a boundary, and at the last one before the end."""
        start, prompt = sequence.num_computed, sequence.num_prompt_tokens
        last = max(0, prompt - 1) // self._span * self._span
        if start >= last:
            return prompt
        return min(start // self._span * self._span + self._profile.costs.chunk_tokens, last)

    def _chunk_ns(self, sequence: Sequence, end_token: int) -> int:
        """Time of the next chunk; all chunks together take as long as the new tokens at once."""
        prefill_ns, hit = self._profile.costs.local_prefill_ns, sequence.hit_tokens
        before = sequence.num_computed - hit
        return prefill_ns(end_token - hit, hit) - (prefill_ns(before, hit) if before else 0)
