"""Prompts after which an engine died: they wait for their turn, and get no third engine."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from array import array
from collections.abc import Callable

from prfaas.core.resilience.quarantine import DEATHS_MAX, PAUSE_NS, Death, Quarantine
from prfaas.gateway.http.errors import PromptBreaksEnginesError, UnavailableError
from prfaas.gateway.tokenization.prompt_encoder import EncodedPrompt
from prfaas.units import NS_PER_S

TURN_S = 60.0
"""Longest that a suspect waits for its turn."""
KEY_BYTES = 32


class PromptQuarantine:
    """Quarantine of prompts, by digests under a key that only this process has.

    Args:
        count: Called with what happens to suspects: "waited", "cleared" or "refused".
        survived_ns: Time after which a suspect that runs holds up no other one, ns.
    """

    def __init__(self, count: Callable[[str], None], survived_ns: int) -> None:
        self._survived_ns = survived_ns
        self._quarantine = Quarantine()
        self._key = secrets.token_bytes(KEY_BYTES)
        self._changed = asyncio.Event()
        self._count = count

    async def enter(self, prompt: EncodedPrompt) -> bytes | None:
        """Admit a request; a suspect waits for a slot.

        Returns:
            The digest of a suspect, for `cleared` or `left`; None for others.

        Raises:
            PromptBreaksEnginesError: Too many engines have died with this prompt in them.
            UnavailableError: Its turn does not come.
        """
        if not len(self._quarantine):
            return None
        digest = self._digest(prompt)
        if not self._quarantine.is_suspect(digest, time.monotonic_ns()):
            return None
        return await self._turn(digest)

    async def killed(self, prompt: EncodedPrompt, death: Death, num_legs: int) -> bytes:
        """An engine died with a prompt in it; wait until another one may be tried.

        Args:
            death: Requests that report the same one are in the same engine.
            num_legs: Requests that the engine had when it died, at least 1.

        Returns:
            Its digest.

        Raises:
            PromptBreaksEnginesError: Too many engines have died with this prompt in them.
            UnavailableError: Its turn does not come.
        """
        digest = self._digest(prompt)
        self._quarantine.killed(digest, death, num_legs, time.monotonic_ns())
        self._changed.set()
        if not self._refused_s(digest):
            await asyncio.sleep(PAUSE_NS / NS_PER_S)
        return await self._turn(digest)

    def cleared(self, digest: bytes) -> None:
        """The first token of a suspect has come."""
        self._quarantine.cleared(digest)
        self._count("cleared")
        self._changed.set()

    def left(self, digest: bytes) -> None:
        """The request of a suspect is over."""
        self._quarantine.left(digest)
        self._changed.set()

    def _survived(self, digest: bytes) -> None:
        self._quarantine.survived(digest)
        self._changed.set()

    async def _turn(self, digest: bytes) -> bytes:
        self._count("waited")
        try:
            async with asyncio.timeout(TURN_S):
                while True:
                    self._check(digest)
                    if self._quarantine.begin(digest):
                        loop = asyncio.get_running_loop()
                        loop.call_later(self._survived_ns / NS_PER_S, self._survived, digest)
                        return digest
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise UnavailableError(
                "an engine died with this prompt in it, and others are tried again first; try again"
            ) from None

    def _check(self, digest: bytes) -> None:
        wait_s = self._refused_s(digest)
        if wait_s:
            self._count("refused")
            raise PromptBreaksEnginesError(
                f"{DEATHS_MAX} engines died with this prompt in them; it is not given to another "
                f"one for {wait_s} s; change the prompt, and notify the operator"
            )

    def _refused_s(self, digest: bytes) -> int:
        return -(-self._quarantine.refused_ns(digest, time.monotonic_ns()) // NS_PER_S)

    def _digest(self, prompt: EncodedPrompt) -> bytes:
        found = hashlib.blake2b(prompt.cache_salt.encode(), key=self._key, digest_size=16)
        for sequence in prompt.sequences:
            ids = array("q", sequence)
            found.update(len(ids).to_bytes(8, "big"))
            found.update(ids.tobytes())
        return found.digest()
