"""Limits on the size of engines' answers, so that a broken engine cannot fill the memory."""

from __future__ import annotations

import aiohttp

from prfaas.errors import EngineError

ANSWER_BYTES_MAX = 32 << 20
"""Limit of a whole answer, an event of a stream, a page such as `/metrics`, and the part of a
stream kept for its continuation.

An answer of 20,000 tokens with 20 log probabilities each fits, vLLM's metrics a hundred times.
"""


class AnswerTooLongError(EngineError):
    """An engine's answer exceeds the limit."""

    def __init__(self, what: str, bytes_max: int) -> None:
        super().__init__(
            f"{what} has more than {bytes_max:,} bytes, the most that the gateway takes"
        )


async def read_answer(response: aiohttp.ClientResponse) -> bytes:
    """All of an engine's answer.

    Raises:
        aiohttp.ClientError: The connection broke.
        AnswerTooLongError: It is longer than the limit; the rest of it was not read.
    """
    answer = bytearray()
    async for part in response.content.iter_any():
        answer += part
        if len(answer) > ANSWER_BYTES_MAX:
            raise AnswerTooLongError(
                f"the engine's answer to {response.url.path}", ANSWER_BYTES_MAX
            )
    return bytes(answer)
