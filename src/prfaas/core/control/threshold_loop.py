"""The short-term loop: moves a link's threshold when one side stays pressed.

A backlog is the sum over time of what a threshold did wrong, so it continues growing while the
threshold already moves back: a loop that follows it swings for ever, however small its steps. Four
rules keep this one still.

- It follows where the gap between both waits will be, not where it is: gap + lead x trend. A
  backlog that is falling calls for nothing more.
- It moves only when the pressure has lasted longer than a signal takes to show a move.
- After a turn it goes at most half as far back as it came. So a swing shrinks by half at every
  turn, whatever the system does, and below the smallest step the loop stands still.
- Pressure that lasts at such an end lets it creep on, and a long time without any sets it free:
  what comes then is another load.

Stale signals hold it where it is.

Recent traffic, for which splits are planned.

Evidence for the threshold: recent requests, and the length at which all stages carry alike.

The plan's threshold is a guess about requests to come, and is wrong where they, the link or the
instances have become others. From what arrived lately and the cost model the best threshold for
exactly these requests follows: the one at which the busiest of local prefill, remote prefill and
link has least to do. With every request the plan counts less and the evidence more.

Offloaded prefill below the threshold: work that would otherwise load the PD cluster.

A stage that is relieved over a busy link looks idle. What it was spared belongs to what it needs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from math import exp, log
from typing import Any, NamedTuple

from prfaas.core.invariants import hold
from prfaas.core.routing.predictions import PathWork
from prfaas.units import BITS_PER_BYTE, NS_PER_S

NUM_MIN = 50
"""Minimum sample size."""
NUM_MAX = 1000
"""Number of requests that are kept."""


@dataclass(frozen=True, slots=True, eq=False)
class TrafficMix:
    """Requests of some time, at least `NUM_MIN`."""

    new_tokens: tuple[int, ...]
    """Incremental length of each."""
    mean_prompt_tokens: float
    mean_output_tokens: float
    """Mean output of those that ended."""


class Mixes:
    """Remembers what came and what ended within some time, and describes it now and then.

    Lengths are known when a request comes: those that end are the short ones where a stage is
    overloaded. Outputs are known at its end alone.
    """

    def __init__(self, window_ns: int) -> None:
        self._window_ns = window_ns
        self._came: deque[tuple[int, int, int]] = deque(maxlen=NUM_MAX)
        self._ended: deque[tuple[int, int]] = deque(maxlen=NUM_MAX)
        self._latest: TrafficMix | None = None
        self._made_at_ns: int | None = None

    def came(self, now_ns: int, num_new: int, num_prompt: int) -> None:
        """A request has come, of so many incremental and prompt tokens."""
        self._came.append((now_ns, num_new, num_prompt))

    def ended(self, now_ns: int, num_output: int) -> None:
        """A request was answered with this number of tokens."""
        self._ended.append((now_ns, num_output))

    def look(self, now_ns: int) -> TrafficMix | None:
        """Recent traffic, at most an eighth of the window old; None is unknown."""
        if self._made_at_ns is None or now_ns - self._made_at_ns >= self._window_ns // 8:
            self._latest, self._made_at_ns = self._describe(now_ns), now_ns
        return self._latest

    def _describe(self, now_ns: int) -> TrafficMix | None:
        came, ended = self._came, self._ended
        for seen in (came, ended):
            while seen and seen[0][0] < now_ns - self._window_ns:
                seen.popleft()
        if min(len(came), len(ended)) < NUM_MIN:
            return None
        _, new, prompts = zip(*came, strict=True)
        outputs = sum(output for _, output in ended)
        return TrafficMix(new, sum(prompts) / len(came), outputs / len(ended))


NUM_KEPT = 512
"""Number of recent requests: enough for the shares of work, few enough to follow the day."""
NUM_FOR_HALF = 128
"""Requests after which plan and evidence count alike."""
CHANGE_MIN = 0.03
"""Smaller changes of a threshold are not made, ln(tokens): 3 %. With 5 %, 1 % fewer requests are in
time under a stale plan."""


class Evidence(NamedTuple):
    """The threshold that plan and recent requests give together, and what it follows from."""

    threshold: int
    """Plan and requests together, tokens."""
    balanced: int
    """The requests alone, tokens: all stages carry alike there."""
    weight: float
    """Weight of the requests beside the plan, in [0, 1)."""
    num_requests: int
    num_local: float
    """Instances that prefill locally."""
    num_remote: float
    """Instances of the remote cluster that the link has to itself."""
    bits_per_s: float
    """Rate of the link."""


class Balance:
    """Recent requests through one link, and the threshold that they ask for.

    Requests are kept in order of length, with sums for each side of the last threshold: the next
    one costs an addition for each request that changes sides, and a request O(log `NUM_KEPT`)
    comparisons.

    Args:
        planned: t of the plan, tokens.
    """

    def __init__(self, planned: int) -> None:
        self._recent: deque[PathWork] = deque()
        self._movable: list[PathWork] = []
        """Those that can go to either cluster, the shortest first."""
        self._lengths: list[Any] = []
        """Their incremental lengths: whole numbers are compared in a third of the time."""
        self._num_short = 0
        """Number of them up to the last threshold."""
        self._local_ns = self._remote_ns = self._shipped_bytes = 0
        """Local work of these and of those that cannot move; remote work and bytes of the rest."""
        self.replan(planned)

    def replan(self, planned: int) -> None:
        """Start over from another plan: what was seen is kept, and counts for nothing yet."""
        self._planned, self._num_seen = max(planned, 1), 0

    def note(self, work: PathWork) -> None:
        """Add a request; the oldest is forgotten once there are `NUM_KEPT`."""
        if len(self._recent) == NUM_KEPT:
            self._count(self._recent.popleft(), -1)
        self._recent.append(work)
        self._count(work, 1)
        self._num_seen += 1

    def _count(self, work: PathWork, sign: int) -> None:
        """Add a request on its side of the threshold, or take it out."""
        if work.remote_ns is None:
            self._local_ns += sign * work.local_ns
            return
        lengths, movable, length = self._lengths, self._movable, work.num_new_tokens
        index = bisect_left(lengths, length)
        while index < len(movable) and movable[index].num_new_tokens == length:
            if movable[index] >= work:
                break
            index += 1
        if sign > 0:
            movable.insert(index, work)
            lengths.insert(index, length)
        else:
            movable.pop(index)
            lengths.pop(index)
        if index < self._num_short:
            self._num_short += sign
            self._local_ns += sign * work.local_ns
        else:
            self._remote_ns += sign * work.remote_ns
            self._shipped_bytes += sign * work.shipped_bytes

    def validate(self) -> None:
        """Check what has to hold between two calls (`hold`)."""
        short, long = self._movable[: self._num_short], self._movable[self._num_short :]
        stay = [work for work in self._recent if work.remote_ns is None]
        hold(
            movable_are_those_that_can_go=sorted(self._movable)
            == sorted(work for work in self._recent if work.remote_ns is not None)
            == self._movable,
            sums_are_those_of_requests=(self._local_ns, self._remote_ns, self._shipped_bytes)
            == (
                sum(work.local_ns for work in (*short, *stay)),
                sum(work.remote_ns or 0 for work in long),
                sum(work.shipped_bytes for work in long),
            ),
        )

    def evidence(self, num_local: float, num_remote: float, bits_per_s: float) -> Evidence | None:
        """Return the threshold that plan and evidence give together; None without any evidence.

        Args:
            num_local: Instances that prefill locally.
            num_remote: Instances of the remote cluster that this link has to itself.
            bits_per_s: What the link carries.
        """
        if not self._num_seen or num_local <= 0 or num_remote <= 0 or bits_per_s <= 0:
            return None
        found = self._balanced(num_local, num_remote, bits_per_s)
        weight = self._num_seen / (self._num_seen + NUM_FOR_HALF)
        both = max(1, round(exp((1 - weight) * log(self._planned) + weight * log(found))))
        seen = len(self._recent), num_local, num_remote, bits_per_s
        return Evidence(both, found, weight, *seen)

    def _balanced(self, num_local: float, num_remote: float, bits_per_s: float) -> int:
        """Move the threshold up to the shortest request that makes local prefill the busiest."""
        ns_per_byte, movable = BITS_PER_BYTE * NS_PER_S / bits_per_s, self._movable

        def is_busiest() -> bool:
            local_ns = (self._local_ns + movable[self._num_short].local_ns) / num_local
            link_ns = self._shipped_bytes * ns_per_byte
            return local_ns > self._remote_ns / num_remote and local_ns > link_ns

        if self._num_short:
            self._pass(-1)
        while self._num_short and is_busiest():
            self._pass(-1)
        while self._num_short < len(movable) and not is_busiest():
            self._pass(1)
        return max(movable[self._num_short - 1].num_new_tokens, 1) if self._num_short else 1

    def _pass(self, sign: int) -> None:
        """Move the threshold beyond the next longer request, or back before the last one."""
        work = self._movable[self._num_short - (sign < 0)]
        self._num_short += sign
        self._local_ns += sign * work.local_ns
        self._remote_ns -= sign * (work.remote_ns or 0)
        self._shipped_bytes -= sign * work.shipped_bytes


class Spared:
    """Turns work that was spared so far into instances' worth of it since the last look."""

    def __init__(self) -> None:
        self._total_ns, self._at_ns = 0, 0

    def look(self, total_ns: int, now_ns: int) -> float:
        """Instances that would have been busy with it, mean since the last look.

        Args:
            total_ns: Work that was spared so far, in time of one instance; never falls.
        """
        spared_ns, elapsed_ns = total_ns - self._total_ns, now_ns - self._at_ns
        self._total_ns, self._at_ns = total_ns, now_ns
        return spared_ns / elapsed_ns if elapsed_ns > 0 else 0.0


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Limits of the loop. Distances are in ln(tokens): 0.1 is about 10 %."""

    step_max: float = 0.05
    """Largest move of one interval."""
    step_min: float = 0.01
    """Smaller moves are not made."""
    reach_max: float = 0.20
    """Farthest that one run goes at full step."""
    span: float = 1.5
    """The threshold stays within the planned one divided and multiplied by this."""
    utilisation_high: float = 0.95
    """Share of the link above which the remote side counts as pressed, unless the local wait is
    longer."""
    wait_gap_ns: int = 2 * NS_PER_S
    """Difference between both waits below which neither side is pressed."""
    wait_gap_ratio: float = 0.5
    """The same as a share of the shorter wait: where both sides are late, no threshold helps."""
    lead_ns: int = 60 * NS_PER_S
    """How far ahead the gap is predicted."""
    trend_weight: float = 0.2
    """Weight of the newest interval in the trend, in (0, 1]."""
    num_to_move: int = 6
    """Intervals that a pressure has to last before the first move."""
    num_to_extend: int = 24
    """Intervals of pressure at the end of the reach after which it grows by two smallest steps."""
    num_to_forget: int = 60
    """Intervals without pressure after which the reach is free again."""


@dataclass(frozen=True, slots=True)
class Pressures:
    """Inputs of the loop; None is unknown or too old."""

    link_utilisation: float | None
    """Share of the link's capacity that was used."""
    local_wait_ns: int | None
    """Predicted wait for local prefill."""
    remote_wait_ns: int | None
    """Predicted wait for remote prefill and link."""


class ThresholdLoop:
    """The threshold of one link.

    Args:
        planned_threshold: t from the planner, tokens, above 0.
    """

    def __init__(self, planned_threshold: int, settings: LoopSettings = LoopSettings()) -> None:
        self._settings = settings
        self._direction, self._travelled, self._num_held = 0, 0.0, 0
        self.replan(planned_threshold)

    def replan(self, planned_threshold: int) -> None:
        """Start over from another planned threshold, tokens, above 0."""
        self._planned = log(planned_threshold)
        self._position = self._planned
        self._num_pressed, self._num_quiet, self._pressed = 0, 0, 0
        self._forget()
        self._seen: tuple[int, int] | None = None
        self._trend = 0.0

    @property
    def threshold(self) -> int:
        """Current t, tokens."""
        return max(1, round(exp(self._position)))

    def update(self, now_ns: int, pressures: Pressures) -> int:
        """One interval has passed.

        Returns:
            The new threshold, tokens; unchanged when a signal is unknown.
        """
        use, here, there = (
            pressures.link_utilisation,
            pressures.local_wait_ns,
            pressures.remote_wait_ns,
        )
        if use is None or here is None or there is None:
            self._seen, self._num_pressed = None, 0
            return self.threshold
        direction = self._pressure(now_ns, use, here, there)
        if self._lasts(direction):
            self._move(direction)
        return self.threshold

    def _pressure(self, now_ns: int, utilisation: float, here_ns: int, there_ns: int) -> int:
        """1 when the remote side will be pressed, -1 when the local one will be, else 0."""
        settings, gap_ns = self._settings, there_ns - here_ns
        limit = max(settings.wait_gap_ns, settings.wait_gap_ratio * min(here_ns, there_ns))
        ahead = gap_ns + settings.lead_ns * self._trend_to(now_ns, gap_ns)
        # Both have to agree: a trend without a gap is noise, and a gap that closes will be gone.
        if gap_ns < -limit and ahead < -limit:
            return -1
        # A full link alone is no reason: its wait has to exceed the local one.
        full = utilisation > settings.utilisation_high and gap_ns > 0
        return 1 if (full or gap_ns > limit) and ahead > limit else 0

    def _trend_to(self, now_ns: int, gap_ns: int) -> float:
        """Change of the gap, ns per ns, smoothed over the last intervals."""
        before, self._seen = self._seen, (now_ns, gap_ns)
        if before is None or now_ns <= before[0]:
            self._trend = 0.0
        else:
            newest = (gap_ns - before[1]) / (now_ns - before[0])
            self._trend += self._settings.trend_weight * (newest - self._trend)
        return self._trend

    def _lasts(self, direction: int) -> bool:
        """Return True if a pressure has lasted long enough for a move."""
        if not direction:
            self._num_pressed = 0
            self._num_quiet += 1
            if self._num_quiet >= self._settings.num_to_forget:
                self._forget()
            return False
        self._num_quiet = 0
        self._num_pressed = self._num_pressed + 1 if direction == self._pressed else 1
        self._pressed = direction
        return self._num_pressed >= self._settings.num_to_move

    def _move(self, direction: int) -> None:
        settings = self._settings
        if direction == -self._direction:
            # What was travelled bounds the way back; a run that was itself cut short counts as cut.
            self._reach, self._travelled, self._num_held = self._travelled / 2, 0.0, 0
        self._direction = direction
        step = min(settings.step_max, self._reach - self._travelled)
        if step < settings.step_min:
            self._wait_for_reach()
            return
        edge = log(settings.span)
        low, high = self._planned - edge, self._planned + edge
        moved = min(max(self._position + direction * step, low), high)
        self._travelled += abs(moved - self._position)
        self._position = moved

    def _wait_for_reach(self) -> None:
        self._num_held += 1
        if self._num_held >= self._settings.num_to_extend:
            self._reach, self._num_held = self._travelled + 2 * self._settings.step_min, 0

    def _forget(self) -> None:
        """Reset after a change of the load, to which earlier swings do not apply."""
        self._direction, self._travelled, self._num_held = 0, 0.0, 0
        self._reach = self._settings.reach_max
