"""Time that instances which decode have for prefills: a bounded share of all time.

While such an instance prefills, its decode steps take many times as long. Fallbacks are few, unless
something is wrong: a link with a hundred prompts in transit is cut, or a queue exceeds a timeout.
Then decode engines that take them all serve nobody. So each has an account that fills with a share
of the time, up to a reserve, and prefills that are left to it are charged to it.
"""

from __future__ import annotations

from prfaas.units import NS_PER_S

SHARE = 0.1
"""Share of the time of an instance that decodes in which it may prefill."""
RESERVE_NS = NS_PER_S
"""Most that is saved up."""


class SpareTime:
    """Accounts of instances.

    Args:
        names: Instances that only decode; all others have as much time as is asked for.
    """

    def __init__(self, names: list[str]) -> None:
        self._balance_ns = dict.fromkeys(names, float(RESERVE_NS))
        self._filled_at_ns = dict.fromkeys(names, 0)

    def add(self, name: str) -> None:
        """Open the account of a new instance."""
        self._balance_ns[name], self._filled_at_ns[name] = float(RESERVE_NS), 0

    def remove(self, name: str) -> None:
        """Close an account."""
        del self._balance_ns[name], self._filled_at_ns[name]

    def has(self, name: str, now_ns: int) -> bool:
        """Return True if an instance may prefill: its account is not overdrawn."""
        return name not in self._balance_ns or self._filled(name, now_ns) > 0

    def take(self, name: str, work_ns: int, now_ns: int) -> None:
        """Charge a prefill to an instance, which may overdraw its account."""
        if name in self._balance_ns:
            self._balance_ns[name] = self._filled(name, now_ns) - work_ns

    def _filled(self, name: str, now_ns: int) -> float:
        gained = SHARE * max(0, now_ns - self._filled_at_ns[name])
        self._filled_at_ns[name] = max(now_ns, self._filled_at_ns[name])
        self._balance_ns[name] = min(self._balance_ns[name] + gained, RESERVE_NS)
        return self._balance_ns[name]
