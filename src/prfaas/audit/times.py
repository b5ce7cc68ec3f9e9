"""Times in audit logs: ISO 8601 in UTC with microseconds, so that their order is that of texts."""

from __future__ import annotations

from datetime import UTC, datetime

from prfaas.errors import ConfigError


def time_text(unix_ns: int) -> str:
    """Unix nanoseconds as text."""
    seconds, rest_ns = divmod(unix_ns, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest_ns // 1000:06d}Z"


def instant(text: str) -> str:
    """A time as in the lines.

    Args:
        text: ISO 8601; without an offset it is UTC.

    Raises:
        ConfigError: It is no time.
    """
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{text[:80]!r} is no time; write 2026-11-23T08:00, in UTC") from None
    found = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    return f"{found:%Y-%m-%dT%H:%M:%S}.{found.microsecond:06d}Z"
