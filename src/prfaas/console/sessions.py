"""BrowserSessions of browsers: each stands for an operator's key, which it does not hold."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

from prfaas.units import NS_PER_S

ID_BYTES = 32
"""Random bytes of a session's id."""
ID_CHARS_MAX = 64
PER_KEY_MAX = 16
"""BrowserSessions of one key; a further one ends the oldest."""
AGE_MAX_NS = 12 * 3600 * NS_PER_S


@dataclass(frozen=True, slots=True)
class BrowserSession:
    """One browser that has signed in."""

    key_hash: str
    """Of its operator's key, as in the deployment file."""
    until_ns: int
    """Instant at which it ends."""


class BrowserSessions:
    """The sessions of one gateway. A restart ends all.

    Only the hash of an id is kept, so the time of a lookup tells nothing about ids.
    """

    def __init__(self, age_max_ns: int = AGE_MAX_NS) -> None:
        self._age_max_ns = age_max_ns
        self._by_id: dict[bytes, BrowserSession] = {}

    def begin(self, key_hash: str, now_ns: int) -> str:
        """Begin one, and return its id, which is secret."""
        self._by_id = {i: each for i, each in self._by_id.items() if each.until_ns > now_ns}
        same = [name for name, each in self._by_id.items() if each.key_hash == key_hash]
        for name in same[: max(len(same) - PER_KEY_MAX + 1, 0)]:
            del self._by_id[name]
        session_id = secrets.token_urlsafe(ID_BYTES)
        self._by_id[_digest(session_id)] = BrowserSession(key_hash, now_ns + self._age_max_ns)
        return session_id

    def key_hash(self, session_id: str, now_ns: int) -> str:
        """Return the hash of the key that a session stands for; empty if there is none."""
        if not session_id or len(session_id) > ID_CHARS_MAX:
            return ""
        found = self._by_id.get(_digest(session_id))
        return found.key_hash if found is not None and found.until_ns > now_ns else ""

    def end(self, session_id: str) -> None:
        """End one, if there is one."""
        self._by_id.pop(_digest(session_id), None)

    def __len__(self) -> int:
        return len(self._by_id)


def _digest(session_id: str) -> bytes:
    return hashlib.sha256(session_id.encode(errors="replace")).digest()
