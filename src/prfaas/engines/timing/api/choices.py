"""The text of an answer as it grows, and where it ends."""

from __future__ import annotations

from typing import Any

from prfaas.engines.timing.api.bodies import Body
from prfaas.engines.timing.api.vocabulary import Vocabulary
from prfaas.engines.timing.blocks import DrawnAnswer

LOGPROB = -0.5
"""Log probability of a token; each further listed token is one lower."""


class AnswerChoice:
    """One answer.

    Args:
        index: Its number in the reply.
        answer: Draws its tokens.
        num_tokens_max: Where it ends at the latest.
        echo: Text that it begins with.
    """

    def __init__(
        self,
        index: int,
        answer: DrawnAnswer,
        vocabulary: Vocabulary,
        body: Body,
        num_tokens_max: int,
        echo: str = "",
    ) -> None:
        self.index, self._answer, self._vocabulary, self._body = index, answer, vocabulary, body
        self._num_max = num_tokens_max
        self._stop_tokens = frozenset(body.stop_token_ids or ())
        self._held_back = max((len(stop) - 1 for stop in body.stops), default=0)
        self.text, self.tokens = echo, list[int]()
        self._answer_at = len(echo)
        self._sent_chars = self._sent_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def grow(self, num_tokens: int) -> None:
        """Record the number of computed tokens of this answer."""
        while self.finish_reason is None and len(self.tokens) < num_tokens:
            token = self._answer.next(self._vocabulary.spoken)
            self.tokens.append(token)
            before = len(self.text)
            self.text += self._vocabulary.texts[token]
            may_stop = len(self.tokens) >= (self._body.min_tokens or 0)
            if may_stop and self._stops(token, before):
                return
            if len(self.tokens) >= self._num_max:
                self.finish_reason = "length"

    def take(self) -> tuple[str, list[int]]:
        """Text and tokens that were not taken yet; text that may turn out a stop is kept back."""
        end = len(self.text) - (0 if self.finish_reason else self._held_back)
        text = self.text[self._sent_chars : max(end, self._sent_chars)]
        tokens = self.tokens[self._sent_tokens :]
        self._sent_chars, self._sent_tokens = self._sent_chars + len(text), len(self.tokens)
        return text, tokens

    def _stops(self, token: int, before: int) -> bool:
        if token in self._stop_tokens:
            self.finish_reason, self.stop_reason = "stop", token
            return True
        start = max(before - self._held_back, self._answer_at)
        found = [(self.text.find(stop, start), stop) for stop in self._body.stops]
        found = [(at, stop) for at, stop in found if at >= 0]
        if found:
            at, stop = min(found)
            self.finish_reason, self.stop_reason = "stop", stop
            self.text = self.text[: at + (len(stop) * self._body.include_stop_str_in_output)]
        return bool(found)

    # Log probabilities: made up, so that clients find the fields they expect.

    def completion_logprobs(self, tokens: list[int]) -> dict[str, Any] | None:
        """Form of the completions API."""
        count = self._body.logprobs
        if count is None or isinstance(count, bool):
            return None
        texts = [self._vocabulary.texts[token] for token in tokens]
        if self._body.return_tokens_as_token_ids:
            texts = [f"token_id:{token}" for token in tokens]
        return {
            "text_offset": [0] * len(tokens),
            "token_logprobs": [LOGPROB] * len(tokens),
            "tokens": texts,
            "top_logprobs": [self._top(token, count) for token in tokens],
        }

    def chat_logprobs(self, tokens: list[int]) -> dict[str, Any] | None:
        """Form of the chat API."""
        if self._body.logprobs is not True:
            return None
        return {
            "content": [
                _entry(self._vocabulary.texts[token], LOGPROB)
                | {
                    "top_logprobs": [
                        _entry(text, logprob)
                        for text, logprob in self._top(token, self._body.top_logprobs or 0).items()
                    ][: self._body.top_logprobs or 0]
                }
                for token in tokens
            ]
        }

    def _top(self, token: int, count: int) -> dict[str, float]:
        others = (self._vocabulary.texts[other] for other in self._vocabulary.spoken)
        chosen = self._vocabulary.texts[token]
        top = {chosen: LOGPROB}
        for text in others:
            if len(top) >= max(count, 1):
                break
            top.setdefault(text, LOGPROB - len(top))
        return top


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
